"""Collectives in programs that are compiled for a GPU: how they are compiled, and what their host
side does with XLA's buffers and stream, on a device that is made of host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshlib as dist
import meshlib.jit as mj
from meshlib.jit import _kinds as kinds
from meshlib.jit import _messages as messages
from meshlib.jit import _permuting as permuting
from meshlib.jit._xla import device_buffers
from meshlib.jit._xla.device_buffers import on_program_stream
from meshlib.jit._xla.program import Callback, Program
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel
from tests.support.gpu import fake_gpu
from tests.support.gpu.fake_nccl import FakeNccl
from tests.support.gpu.host_driver import HostDriver, HostMachine

N = 3
BACKENDS = ["inproc", "cpu:inproc,cuda:cuda_ipc", "cpu:inproc,cuda:nccl"]


def lowered_for_cuda(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_for_a_gpu_call_by_xlas_target_for_it() -> None:
    def body() -> None:
        x = jnp.ones(3)
        text = lowered_for_cuda(lambda x: mj.all_reduce(jax.lax.sin(x)) * 2, x)
        assert text.count("@xla_buffer_python_gpu_callback") == 1
        assert "xla_buffer_python_cpu_callback" not in text
        # In order: a token goes in and comes out; the operand's buffer is the result's.
        assert "!stablehlo.token" in text
        assert "output_operand_alias" in text
        text = lowered_for_cuda(mj.barrier)
        assert "@xla_buffer_python_gpu_callback" in text

    run_ranks(body, 2)


def test_gradients_of_parameters_on_the_cpu_are_refused_in_a_program_for_a_gpu() -> None:
    def body() -> None:
        params = {"w": jnp.ones(3)}
        ddp = DistributedDataParallel(params)
        step = ddp.value_and_grad(lambda p: (p["w"] ** 2).sum())
        with pytest.raises(NotImplementedError, match="it runs on the device of the parameters"):
            lowered_for_cuda(step, params)

    run_ranks(body, 2)


class Buffer:
    """A buffer as XLA passes it: foreign memory, without a stream."""

    def __init__(self, array: fake_gpu.FakeArray, named: bool = True) -> None:
        self.array = array
        self.shape, self.dtype, self.named = array.shape, array.dtype, named

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = dict(self.array.__cuda_array_interface__)
        del interface["stream"]
        return {**interface, "version": 2}


class Program_:
    """A program's stream, and the call of ``collective`` in it."""

    def __init__(self, driver: HostDriver, collective: Any) -> None:
        self.driver = driver
        self.stream = driver.create_stream(dist.get_rank())

        def run(outputs: Any, inputs: Any, program: Program) -> None:
            x = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype)
            collective.function(x)(outputs, inputs, program)

        views = functools.partial(on_program_stream, driver=driver)
        self.callback = Callback(run, Program(), 1, 1, views)

    def array(self, values: Any) -> fake_gpu.FakeArray:
        with self.driver.on(dist.get_rank(), self.stream):
            return fake_gpu.array(self.driver, values, dist.get_rank())

    def call(self, x: fake_gpu.FakeArray, out: fake_gpu.FakeArray) -> None:
        token = SimpleNamespace()
        context = SimpleNamespace(stream=self.stream)
        assert self.callback(context, token, Buffer(x), token, Buffer(out)) == ()

    def read(self, array: fake_gpu.FakeArray) -> np.ndarray[Any, Any]:
        with self.driver.on(dist.get_rank(), self.stream):
            return array.get()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def run(body: Any, backend: str, n: int = N, seed: int = 0) -> list[Any]:
        machine = HostMachine(n, seed)
        monkeypatch.setattr(
            "transport._nccl.communicator.load_nccl", lambda: FakeNccl(HostDriver(machine))
        )
        monkeypatch.setattr(HostDriver, "device_id", lambda _, device: f"host:{device}")
        monkeypatch.setattr(device_buffers, "cuda_driver", lambda: HostDriver(machine))
        return run_ranks(lambda: body(HostDriver(machine)), n, backend=backend)

    return run


def group() -> Any:
    return dist.new_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_comes_between_the_programs_work_before_and_after(
    run: Callable[..., Any], backend: str
) -> None:
    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()
        program = Program_(driver, kinds.AllReduce(group(), dist.ReduceOp.SUM))
        x = program.array(np.zeros(100, np.float32))
        with driver.on(rank, program.stream):
            x.add(rank + 1)  # not done when the call is made
        program.call(x, x)  # XLA gave the operand's memory for the result
        with driver.on(rank, program.stream):
            x.add(0.5)
        assert (program.read(x) == 6.5).all()
        assert driver.current_stream(rank) == driver._defaults[rank]  # as it was before

    run(body, backend)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_the_host_thread_that_runs_the_program_is_not_held(
    run: Callable[..., Any], backend: str
) -> None:
    """The program's earlier work is not done, and the call is made all the same."""

    def body(driver: HostDriver) -> None:
        program = Program_(driver, kinds.AllReduce(group(), dist.ReduceOp.SUM))
        x = program.array(np.ones(10, np.float32))
        program.call(x, x)  # the first one meets the others
        assert (program.read(x) == N).all()
        driver.machine.hold(program.stream)
        program.call(x, x)
        driver.machine.release(program.stream)
        assert (program.read(x) == N * N).all()

    run(body, backend)


def values_of(rank: int) -> np.ndarray[Any, Any]:
    return np.arange(12, dtype=np.float32).reshape(3, 4) + 100 * rank


ALL = [values_of(rank) for rank in range(N)]
ROW = [sum(a[i] for a in ALL) for i in range(N)]
PAIRS = ((0, 1), (1, 2))


def half(kind: Any) -> Callable[[Any], Any]:
    return lambda group: kind(group, permuting.Permute(group, PAIRS), 0)


CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], Callable[[int], Any]]] = {
    "broadcast": (lambda g: kinds.Broadcast(g, 1), (3, 4), lambda r: ALL[1]),
    "reduce": (
        lambda g: kinds.Reduce(g, 2, dist.ReduceOp.SUM),
        (3, 4),
        lambda r: sum(ALL) if r == 2 else 0 * ALL[0],
    ),
    "all_gather": (kinds.AllGather, (3, 3, 4), lambda r: np.stack(ALL)),
    "reduce_scatter": (
        lambda g: kinds.ReduceScatter(g, dist.ReduceOp.SUM),
        (4,),
        lambda r: ROW[r],
    ),
    "averaging_gather": (
        lambda g: kinds.ReduceScatter(g, dist.ReduceOp.AVG).transposed(),
        (3, 3, 4),
        lambda r: np.stack(ALL) / np.float32(N),
    ),
    "gather": (
        lambda g: kinds.Gather(g, 0),
        (3, 3, 4),
        lambda r: np.stack(ALL) if r == 0 else np.zeros((3, 3, 4)),
    ),
    "scatter": (lambda g: kinds.Scatter(g, 1), (4,), lambda r: ALL[1][r]),
    "all_to_all": (
        kinds.AllToAll,
        (3, 4),
        lambda r: np.stack([a[r] for a in ALL]),
    ),
    "permute": (
        lambda g: permuting.Permute(g, PAIRS),
        (3, 4),
        lambda r: ALL[r - 1] if r else 0 * ALL[0],
    ),
    "permute_start": (half(permuting.PermuteStart), (3, 4), lambda r: ALL[r]),
    "permute_done": (
        half(permuting.PermuteDone),
        (3, 4),
        lambda r: ALL[r - 1] if r else 0 * ALL[0],
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_values(run: Callable[..., Any], backend: str) -> None:
    def body(driver: HostDriver) -> None:
        rank, members = dist.get_rank(), group()
        for name, (make, shape, wanted) in CASES.items():
            collective = make(members)
            program = Program_(driver, collective)
            x = program.array(values_of(rank))
            out = x if collective.in_place else program.array(np.full(shape, -1, np.float32))
            program.call(x, out)
            assert np.array_equal(program.read(out), wanted(rank)), name

    run(body, backend, seed=3)


def test_messages_and_what_they_are_transposed_to(run: Callable[..., Any]) -> None:
    def body(driver: HostDriver) -> None:
        rank, members = dist.get_rank(), group()
        there = messages.Send(members, 1, 5) if rank == 0 else messages.Receive(members, 0, 5)
        for collective, wanted in (
            (there, 7),
            (there.transposed(), 8 if rank else 7 + 8),  # zeros come of no call
        ):
            program = Program_(driver, collective)
            x = program.array(np.full(4, 7 + rank, np.float32))
            program.call(x, x)
            assert (program.read(x) == wanted).all()

    run(body, "inproc", 2)


def test_an_address_without_a_name_for_the_dtype_comes_by_dlpack(
    run: Callable[..., Any],
) -> None:
    """As XLA's bfloat16 buffers, for which NumPy's type strings have no name."""
    from meshlib.jit._xla.device_buffers import _address

    class Nameless:
        def __init__(self) -> None:
            self.values = np.ones(3, np.float32)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("no type string for bf16")

        def __dlpack__(self) -> Any:
            return self.values.__dlpack__()

    buffer = Nameless()
    assert _address(buffer) == buffer.values.ctypes.data
