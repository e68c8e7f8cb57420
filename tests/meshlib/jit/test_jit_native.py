"""Calls that compiled programs make without the interpreter, and what Python has to do for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world
from meshlib.testing import run_ranks

jax = pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

import jax.numpy as jnp  # noqa: E402

from meshlib import jit as mj  # noqa: E402
from meshlib.jit._xla import direct, host_calls  # noqa: E402

needs_handler = pytest.mark.skipif(
    direct.handler is None, reason="the core was built without XLA's header"
)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    """The calls that Python made: None, or the header of one that was begun."""
    made: list[bytes | None] = []
    make = direct.DirectCallback.make

    def note(self: Any, header: bytes | None, views: Any) -> None:
        made.append(header)
        make(self, header, views)

    monkeypatch.setattr(direct.DirectCallback, "make", note)
    return made


@pytest.fixture
def long_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other look whether all is as usual than at the first call: a busy machine is slow."""
    monkeypatch.setattr(direct, "MOMENT", 60.0)


def neighbours() -> tuple[int, int]:
    me, size = dist.get_rank(), dist.get_world_size()
    return (me + 1) % size, (me - 1) % size


def everything(x: Any) -> list[Any]:
    """One call of each kind; the results are small whole numbers."""
    right, left = neighbours()
    size = dist.get_world_size()
    rows = jnp.stack([x + i for i in range(size)])
    return [
        mj.all_reduce(x),
        mj.all_reduce(x.astype(jnp.int32), dist.ReduceOp.MAX),
        mj.broadcast(x, 1),
        mj.reduce(x, 1),
        mj.all_gather(x),
        mj.all_gather(x[: dist.get_rank()], tiled=True, sizes=list(range(size))),
        mj.reduce_scatter(rows),
        mj.all_to_all(rows),
        mj.gather(x, 0),
        mj.scatter(rows, 1),
        mj.permute(x, [(0, 1), (1, 0)]),
        mj.sendrecv(x, right, left),
        mj.sendrecv(x, dist.get_rank(), dist.get_rank()),
        mj.sendrecv(x, right, left, like=jnp.zeros((2, 2), x.dtype), tag=1),
        mj.recv(x, left, tag=2) if dist.get_rank() else mj.send(x, right, tag=2),
        mj.send(x, right, tag=2) if dist.get_rank() else mj.recv(x, left, tag=2),
    ]


@needs_handler
@pytest.mark.usefixtures("long_moments")
@pytest.mark.parametrize("size", [2, 3])
def test_the_results_of_compiled_code_are_those_of_python(size: int) -> None:
    def rank() -> Any:
        program = jax.jit(everything)
        x = jnp.arange(4.0) + 10 * dist.get_rank()
        results = []
        for _ in range(4):
            results.append([np.asarray(a) for a in program(x)])
        native = [entry for state in groups() for entry in state.calls.native.entries()]
        records = [
            (r.kind, r.header, bool(r.ended) and not r.error)
            for r in current_world().recorder.records()
        ]
        return results, len(native), records

    for results, native, records in run_ranks(rank, size, backend="shm"):
        for later in results[1:]:
            for one, other in zip(results[0], later, strict=True):
                np.testing.assert_array_equal(one, other)
        # Whoever waits long is served by Python: not all can be expected here.
        assert native
        calls = [(kind, header._replace(sequence=0, history=0)) for kind, header, _ in records]
        once = len(calls) // 4
        assert sorted(calls[-once:]) == sorted(calls[:once])
        assert {state for *_, state in records} == {True}
        collectives = [h.sequence for k, h, _ in records if k not in {"send", "recv"}]
        assert sorted(collectives) == list(range(1, len(collectives) + 1))


def groups() -> list[Any]:
    """The state inside jax.jit of the groups of this rank's programs."""
    states = [call_queue_of(group).state.in_jit for group in current_world().groups()]
    return [state for state in states if state is not None and state.calls is not None]


@needs_handler
@pytest.mark.usefixtures("long_moments")
@pytest.mark.parametrize("late", ["all_reduce", "recv", "sendrecv"])
def test_a_call_that_waits_long_goes_on_in_python(late: str, by_python: list[bytes | None]) -> None:
    def rank() -> list[float]:
        me = dist.get_rank()
        other = 1 - me
        call: Callable[[Any], Any] = {
            "all_reduce": mj.all_reduce,
            "recv": lambda x: mj.recv(x, other) if me else mj.send(x, other),
            "sendrecv": lambda x: mj.sendrecv(x, other, other),
        }[late]
        program = jax.jit(call)
        x = jnp.full(3, 1.0 + me)
        program(x).block_until_ready()
        out = program(x).block_until_ready()
        dist.barrier()
        by_python.clear()
        dist.barrier()
        if me == 0:
            time.sleep(0.3)
        out = program(x).block_until_ready()
        dist.barrier()
        assert any(header is not None for header in by_python)
        return np.asarray(out).tolist()

    expected = {"all_reduce": [3, 3], "recv": [1, 1], "sendrecv": [2, 1]}[late]
    for got, value in zip(run_ranks(rank, 2, backend="shm"), expected, strict=True):
        assert got == [value] * 3


@needs_handler
@pytest.mark.usefixtures("long_moments")
def test_calls_outside_of_programs_come_between_those_of_compiled_code() -> None:
    def rank() -> tuple[list[float], int]:
        me, (right, left) = dist.get_rank(), neighbours()
        program = jax.jit(lambda x: mj.all_reduce(mj.sendrecv(x, right, left)))
        x, got = jnp.full(3, 1.0 + me), np.empty(3)
        seen: list[float] = []
        for i in range(6):
            seen.append(float(program(x)[0]))
            mine = np.full(3, 10.0 * i + me)
            if me:
                dist.recv(got, left)
                dist.send(mine, right)
            else:
                dist.send(mine, right)
                dist.recv(got, left)
            dist.all_reduce(mine)
            seen += [float(got[0]), float(mine[0])]
        return seen, sum(len(state.calls.native.entries()) for state in groups())

    for me, (seen, native) in enumerate(run_ranks(rank, 2, backend="shm")):
        assert seen == [value for i in range(6) for value in (3, 10 * i + 1 - me, 20 * i + 1)]
        assert native  # Python makes a part of them


@needs_handler
@pytest.mark.usefixtures("long_moments")
def test_calls_that_differ_or_never_come_are_named() -> None:
    def rank() -> None:
        me = dist.get_rank()
        x = jnp.ones(4)
        for _ in range(3):
            jax.jit(mj.all_reduce)(x).block_until_ready()
        group = dist.new_group([0, 1], timeout=0.3)
        for _ in range(3):
            jax.jit(lambda x: mj.all_reduce(x, group=group))(x).block_until_ready()
        if me == 0:
            program = jax.jit(lambda x: mj.all_reduce(x, group=group))
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"CollectiveTimeoutError.*rank 1"):
                program(x).block_until_ready()
        dist.barrier()
        program = jax.jit(lambda x: mj.all_reduce(mj.all_reduce(x)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="CollectiveMismatchError"):
            program(x if me else x[:2]).block_until_ready()

    run_ranks(rank, 2, backend="shm")


def test_a_program_of_jit_hides_its_calls_from_jax_and_keeps_their_order() -> None:
    def rank() -> Any:
        me = dist.get_rank()

        @mj.jit
        def first(x: Any) -> Any:
            return jax.lax.fori_loop(0, 3, lambda _, y: mj.all_reduce(y) / 2, x)

        second = mj.jit(
            lambda x, times: {"largest": mj.all_reduce(x * times, dist.ReduceOp.MAX)},
            static_argnums=1,
        )
        alone = mj.jit(mj.barrier)
        x = jnp.full(2, 1.0 + me)
        for _ in range(5):  # neither needs what the other returns
            out = first(x), second(x, 3)["largest"]
            alone()
        assert not first._whole.trace(x).jaxpr.effects
        inside = jax.jit(jax.grad(lambda x: first(x).sum()))(x)
        calls = [r.kind for r in current_world().recorder.records() if r.group.startswith("jit")]
        with pytest.raises(RuntimeError, match="in order within a thread only"):
            in_a_thread(first, x)
        return jax.tree.map(np.asarray, (*out, inside)), calls

    once = [*["all_reduce"] * 4, "barrier"]
    for (loop, largest, inside), calls in run_ranks(rank, 2):
        np.testing.assert_array_equal(loop, 1.5)
        np.testing.assert_array_equal(largest, 6)
        np.testing.assert_array_equal(inside, 1)
        assert calls[: len(once) * 5] == once * 5


def in_a_thread(function: Callable[..., Any], *arguments: Any) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if raised:
        raise raised[0]


def test_a_version_of_jax_that_is_not_tested_is_refused_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host_calls.check_version((0, 8, 2))
    for version in ((0, 8, 1), (0, 13, 0)):
        with pytest.raises(RuntimeError, match=r"from 0\.8\.2 .*MESHLIB_ANY_JAX=1"):
            host_calls.check_version(version)
    monkeypatch.setenv("MESHLIB_ANY_JAX", "1")
    host_calls.check_version((0, 13, 0))
