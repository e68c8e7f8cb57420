"""Calls that compiled code makes and calls that Python makes are the same, in any mixture.

A timeout that is a string leaves a call to Python. Everything else about it stays the same.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import meshlib as dist
from meshlib import extend
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world
from meshlib._native import calls as native
from meshlib.testing import run_ranks
from transport._operands.reduce_op import RedOpType

pytestmark = pytest.mark.skipif(native is None, reason="there is no compiled core here")

IN_C, IN_PYTHON = 60.0, "60s"
SIZES = (2, 3)
Call = Callable[..., Any]
Make = Callable[[int, int, str], tuple[Call, tuple[Any, ...]]]


def values(rank: int, count: int, dtype: str = "f4") -> np.ndarray:
    return (np.arange(count) % 5 + rank).astype(dtype)


def group() -> Any:
    return dist.group.WORLD


def lists(rank: int, size: int, dtype: str, root: int) -> Any:
    return [values(rank + i, 6, dtype) for i in range(size)] if rank == root else None


# By kind: what makes a call and its arguments on a rank, of new arrays.
KINDS: dict[str, Make] = {
    "barrier": lambda r, n, d: (group().barrier, ()),
    "all_reduce": lambda r, n, d: (group().all_reduce, (values(r, 6, d),)),
    "all_reduce_large": lambda r, n, d: (group().all_reduce, (values(r, 70_000, d),)),
    "all_reduce_product": lambda r, n, d: (
        group().all_reduce,
        (values(r, 3, d), dist.ReduceOp.PRODUCT),
    ),
    "broadcast": lambda r, n, d: (group().broadcast, (values(r, 6, d), 1)),
    "reduce": lambda r, n, d: (group().reduce, (values(r, 6, d), n - 1)),
    "all_gather": lambda r, n, d: (
        group().all_gather,
        ([np.zeros(6, d) for _ in range(n)], values(r, 6, d)),
    ),
    "all_gather_into_tensor": lambda r, n, d: (
        group().all_gather_into_tensor,
        (np.zeros((n, 6), d), values(r, 6, d)),
    ),
    "all_gather_large": lambda r, n, d: (
        group().all_gather_into_tensor,
        (np.zeros(n * 70_000, d), values(r, 70_000, d)),
    ),
    "reduce_scatter": lambda r, n, d: (
        group().reduce_scatter,
        (np.zeros(6, d), [values(r + i, 6, d) for i in range(n)]),
    ),
    "reduce_scatter_tensor": lambda r, n, d: (
        group().reduce_scatter_tensor,
        (np.zeros(6, d), values(r, 6 * n, d)),
    ),
    "gather": lambda r, n, d: (
        group().gather,
        (values(r, 6, d), [np.zeros(6, d) for _ in range(n)] if r == 0 else None),
    ),
    "scatter": lambda r, n, d: (group().scatter, (np.zeros(6, d), lists(r, n, d, 1), 1)),
    "all_to_all": lambda r, n, d: (
        group().all_to_all,
        ([np.zeros(6, d) for _ in range(n)], [values(r + i, 6, d) for i in range(n)]),
    ),
    "all_to_all_single": lambda r, n, d: (
        group().all_to_all_single,
        (np.zeros(6 * n, d), values(r, 6 * n, d)),
    ),
}


def is_in_c(make: Make, timeout: Any) -> bool:
    """Make a call; return whether compiled code made it, and see to it that it is as expected."""
    call_queue, issued = call_queue_of(group()), []
    original = call_queue.issue

    def issue(*arguments: Any) -> Any:
        issued.append(arguments)
        return original(*arguments)

    call, arguments = make(dist.get_rank(), dist.get_world_size(), "f4")
    call_queue.issue = issue
    try:
        call(*arguments, timeout=timeout)
    finally:
        del call_queue.issue
    return not issued


def outcome(call: Call, arguments: tuple[Any, ...], timeout: Any) -> tuple[Any, ...]:
    """Make a call; return what it returned, what is in its arrays, and its record."""
    returned = call(*arguments, timeout=timeout)
    record = current_world().recorder.records()[-1]
    same = [i for i, argument in enumerate(arguments) if argument is returned]
    header = record.header.what._replace(sequence=0)
    fields = (header, record.nbytes, record.peer, record.sync, record.error, record.seconds)
    assert record.issued <= record.started <= record.ended
    return plain(returned), same, plain(arguments), fields, record.site


def plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def ways(size: int) -> list[list[Any]]:
    """Return the ways of the ranks: all in C, all in Python, and both mixtures of the two."""
    mixed = [IN_C if rank % 2 else IN_PYTHON for rank in range(size)]
    return [[IN_C] * size, [IN_PYTHON] * size, mixed, mixed[::-1] if size % 2 == 0 else mixed]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_give_the_same_in_any_mixture(kind: str, size: int) -> None:
    def program() -> list[Any]:
        rank = dist.get_rank()
        dist.barrier()
        assert is_in_c(KINDS[kind], IN_C)
        assert not is_in_c(KINDS[kind], IN_PYTHON)
        return [
            outcome(*KINDS[kind](rank, size, "i4"), way[rank]) for way in ways(size) for _ in "abc"
        ]

    for found in run_ranks(program, size, backend="shm"):
        assert all(one == found[0] for one in found)
        assert "test_ways" in found[0][-1]


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "f2", "f8", "c8", "c16", "bf16"])
@pytest.mark.parametrize("kind", ["broadcast", "all_gather_into_tensor", "scatter", "all_reduce"])
def test_every_dtype_has_one_code(kind: str, dtype: str) -> None:
    of: Any = ml_dtypes.bfloat16 if dtype == "bf16" else dtype

    def program() -> list[Any]:
        rank = dist.get_rank()
        dist.barrier()
        return [outcome(*KINDS[kind](rank, 2, of), way[rank]) for way in ways(2)]

    for found in run_ranks(program, 2, backend="shm"):
        assert all(one == found[0] for one in found)


def attempt(made: Any, call: Call, arguments: tuple[Any, ...], **others: Any) -> Any:
    """Return what a call gives on the group ``made``, or what that raises; both come to the end."""
    try:
        result = getattr(made, call.__name__)(*arguments, **others)
        made.barrier()
    except (TypeError, ValueError) as error:
        with suppress(dist.DistError):  # where the other one made its call, this one is told
            made.barrier()
        return type(error).__name__, re.sub(r"0x[0-9a-f]+|group '[^']*'", "", str(error))
    except (dist.CollectiveMismatchError, dist.RankFailedError) as error:
        # Which rank notices first is a race.
        return [re.sub(r"group '[^']*'", "group", line) for line in str(error).splitlines()[:4]]
    return plain(result), plain(arguments)


def compare(make: Callable[[], tuple[Call, tuple[Any, ...]]], **others: Any) -> None:
    """Make a call as it comes, and once more with no compiled code, each on a group of its own."""
    found = []
    for without in (False, True):
        made = dist.new_group(range(dist.get_world_size()))
        made.barrier()
        if without:
            call_queue_of(made).state.fast_path = None
        found.append(attempt(made, *make(), **others))
        dist.barrier()
    assert repr(found[0]) == repr(found[1])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "barrier"])
def test_members_of_different_calls_raise_the_same(kind: str) -> None:
    def program() -> list[Any]:
        rank, texts = dist.get_rank(), []
        for way in ways(2):
            made = dist.new_group([0, 1])
            made.barrier()
            found = attempt(made, *KINDS[kind](rank, 2, ("i4", "f8")[rank]), timeout=way[rank])
            assert "different calls" in found[0]
            texts.append(found)
            dist.barrier()
        return texts

    for texts in run_ranks(program, 2, backend="shm"):
        assert all(text == texts[0] for text in texts), texts


class Sub(np.ndarray):
    """An array that behaves as others do."""


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


# What becomes of an array, which no longer is as usual.
STRANGE: dict[str, Callable[[np.ndarray], Any]] = {
    "gaps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "fortran": lambda x: np.asfortranarray(np.resize(x, (x.size // 2, 2))),
    "read_only": read_only,
    "big_endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "subclass": lambda x: x.view(Sub),
    "other_dtype": lambda x: x.astype("f8"),
    "objects": lambda x: x.astype(object),
    "shorter": lambda x: x.reshape(-1)[:-1],
    "empty": lambda x: x[:0],
    "no_dims": lambda x: np.array(x.reshape(-1)[0]),
    "scalar": lambda x: x.reshape(-1)[0],
    "bytes": lambda x: bytearray(x.tobytes()),
    "list": list,
    "none": lambda _: None,
    "number": lambda _: 1.5,
    "unaligned": lambda x: np.frombuffer(bytearray(b"." + x.tobytes()), x.dtype, offset=1),
}


def strange_arguments(arguments: tuple[Any, ...], at: int, how: str) -> tuple[Any, ...]:
    """Return the arguments with number ``at``, or the first of its list, turned strange."""
    turned: list[Any] = list(arguments)
    if isinstance(turned[at], list):
        turned[at] = [STRANGE[how](turned[at][0]), *turned[at][1:]]
    elif isinstance(turned[at], np.ndarray):
        turned[at] = STRANGE[how](turned[at])
    return tuple(turned)


@pytest.mark.parametrize("how", STRANGE)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "large" not in kind])
def test_strange_arrays_end_the_same(kind: str, how: str) -> None:
    def program() -> None:
        dist.barrier()
        for at in (0, 1):
            if at < len(KINDS[kind](dist.get_rank(), 2, "f4")[1]):
                compare(lambda at=at: make(at))

    def make(at: int) -> tuple[Call, tuple[Any, ...]]:
        call, arguments = KINDS[kind](dist.get_rank(), 2, "f4")
        return call, strange_arguments(arguments, at, how)

    run_ranks(program, 2, backend="shm")


@pytest.mark.parametrize(
    ("kind", "at", "value"),
    [
        *[("broadcast", 1, value) for value in (-1, 2, 2**70, True, np.int64(1), 1.0, "1", None)],
        *[("reduce", 1, value) for value in (-1, 2, 2**70, np.int64(1), None)],
        *[("all_reduce_product", 1, value) for value in (None, 1, "SUM", dist.ReduceOp)],
        *[("all_reduce_product", 1, value) for value in (RedOpType.SUM, dist.ReduceOp.BAND)],
        ("all_reduce_product", 1, dist.premul_sum(2.0)),
        ("all_reduce_product", 1, dist.ReduceOp(RedOpType.SUM)),
        ("scatter", 2, 5),
        ("scatter", 2, None),
    ],
)
def test_strange_roots_and_ops_end_the_same(kind: str, at: int, value: Any) -> None:
    def make() -> tuple[Call, tuple[Any, ...]]:
        call, arguments = KINDS[kind](dist.get_rank(), 2, "f4")
        return call, (*arguments[:at], value, *arguments[at + 1 :])

    run_ranks(lambda: (dist.barrier(), compare(make)), 2, backend="shm")


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), 60, True, "x", None, 1j])
def test_strange_timeouts_end_the_same(timeout: Any) -> None:
    def program() -> None:
        dist.barrier()
        compare(lambda: KINDS["all_reduce"](dist.get_rank(), 2, "f4"), timeout=timeout)

    run_ranks(program, 2, backend="shm")


@pytest.mark.parametrize("start", [0, 1, 4, 6])
@pytest.mark.parametrize("kind", range(6))
def test_overlapping_arrays_end_the_same(kind: int, start: int) -> None:
    def make() -> tuple[Call, tuple[Any, ...]]:
        whole = np.arange(12.0)
        part = whole[start : start + 6]
        return (
            (group().all_gather_into_tensor, (whole, part)),
            (group().all_to_all_single, (whole[:6], part)),
            (group().reduce_scatter_tensor, (part, whole)),
            (group().all_gather, ([whole[:6], whole[6:]], part)),
            (group().all_gather, ([whole[:6], part], np.ones(6))),
            (group().reduce_scatter, (part, [whole[:6], whole[6:]])),
        )[kind]

    run_ranks(lambda: compare(make), 2, backend="shm")


def test_the_own_part_may_be_the_whole_arrays() -> None:
    def program() -> Any:
        dist.barrier()
        rank, found = dist.get_rank(), []
        for timeout in (IN_C, IN_PYTHON):
            whole = np.full((2, 3), 9.0)
            whole[rank] = rank
            group().all_gather_into_tensor(whole, whole[rank], timeout=timeout)
            summed = np.arange(6.0)
            group().reduce_scatter_tensor(summed[3 * rank : 3 * rank + 3], summed, timeout=timeout)
            found.append((whole.tolist(), summed.tolist()))
        return found

    for found in run_ranks(program, 2, backend="shm"):
        assert found[0] == found[1]
        assert found[0][0] == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_a_closed_one_and_a_stranger(kind: str) -> None:
    def program() -> None:
        rank = dist.get_rank()
        made = dist.new_group([0])
        made_of_all = dist.new_group([0, 1])
        made_of_all.barrier()
        call, arguments = KINDS[kind](rank, 2, "f4")
        name = call.__name__
        if rank == 1:
            assert getattr(made, name)(*arguments) is None
        elif kind in ("barrier", "all_reduce"):
            getattr(made, name)(*arguments)
        dist.destroy_process_group(made_of_all)
        with pytest.raises(ValueError, match="was destroyed"):
            getattr(made_of_all, name)(*arguments)

    run_ranks(program, 2, backend="shm")


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_group_says_what_broke_it(kind: str) -> None:
    def program() -> None:
        rank = dist.get_rank()
        made = dist.new_group([0, 1])
        made.barrier()
        dist.barrier()
        made.abort("for a test")
        call, arguments = KINDS[kind](rank, 2, "f4")
        with pytest.raises(dist.DistBackendError, match="for a test"):
            getattr(made, call.__name__)(*arguments)

    run_ranks(program, 2, backend="shm")


@pytest.mark.parametrize("kind", KINDS)
def test_works_and_observers_go_by_python(kind: str) -> None:
    def program() -> Any:
        rank, seen, found = dist.get_rank(), [], []
        dist.barrier()

        def observer(members: Any, header: Any, device: str, run: Any) -> Any:
            seen.append(header.kind)
            return run

        call, arguments = KINDS[kind](rank, 2, "i4")
        found.append((plain(call(*arguments)), plain(arguments)))
        call, arguments = KINDS[kind](rank, 2, "i4")
        found.append((plain(call(*arguments, async_op=True).result()), plain(arguments)))
        with extend.observe(group(), observer):
            call, arguments = KINDS[kind](rank, 2, "i4")
            found.append((plain(call(*arguments)), plain(arguments)))
        assert len(seen) == 1
        return found

    for found in run_ranks(program, 2, backend="shm"):
        assert found[0] == found[1] == found[2]


def exchanged(timeout: Any, count: int, tag: int, late: bool) -> list[Any]:
    """Send an array to the next rank and back, and return what came, with the records."""
    rank, x = dist.get_rank(), values(dist.get_rank(), count)
    got, before = np.zeros_like(x), len(current_world().recorder.records())
    for turn in (0, 1):
        if rank == turn:
            if late:
                time.sleep(0.02)  # longer than compiled code looks for a message
            assert group().send(x, 1 - rank, tag, timeout=timeout) is None
        else:
            assert group().recv(got, 1 - rank, tag, timeout=timeout) == 1 - rank
    records = current_world().recorder.records()[before:]
    calls = [(r.header._replace(sequence=0), r.nbytes, r.peer, r.error, r.sync) for r in records]
    return [got.tolist(), calls]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count", [1, 1000, 5000, 400_000])
def test_messages_are_the_same_in_any_mixture(count: int, late: bool) -> None:
    def program() -> list[Any]:
        rank = dist.get_rank()
        exchanged(IN_PYTHON, 1, 0, late)  # after which the core knows the rings
        return [exchanged(way[rank], count, 7, late) for way in ways(2) for _ in "ab"]

    for rank, found in enumerate(run_ranks(program, 2, backend="shm")):
        assert all(one == found[0] for one in found)
        assert found[0][0] == values(1 - rank, count).tolist()


def test_messages_find_their_receives_whatever_makes_them() -> None:
    def program() -> None:
        rank, other = dist.get_rank(), 1 - dist.get_rank()
        exchanged(IN_PYTHON, 1, 0, late=False)
        x, y = np.zeros(3), np.zeros(3)
        for timeout in (IN_C, IN_PYTHON):
            if rank == 0:
                for tag in (1, 2, 2, 1):  # not in the order of the receives
                    group().send(np.full(3, float(tag)), other, tag, timeout=timeout)
                group().send(np.ones(4), other, timeout=timeout)
                group().send(np.ones(3, "f4"), other, timeout=timeout)
                group().send(np.full(3, 9.0), other, timeout=timeout)
                work = group().isend(np.full(3, 5.0), other)
                group().send(np.full(3, 6.0), other, timeout=timeout)
                work.wait()
                continue
            first = group().irecv(y, other, 2)
            for tag in (2, 1, 1):
                assert group().recv(x, other, tag, timeout=timeout) == 0
                assert x.tolist() == [tag] * 3
            first.wait()
            assert y.tolist() == [2.0] * 3
            for _ in range(2):
                with pytest.raises(dist.CollectiveMismatchError, match="elements of float"):
                    group().recv(x, other, timeout=timeout)
            for value in (9.0, 5.0, 6.0):
                group().recv(x, timeout=timeout)  # from anybody
                assert x.tolist() == [value] * 3

    run_ranks(program, 2, backend="shm")


def test_a_receive_from_a_rank_that_is_gone_says_so() -> None:
    def program() -> None:
        exchanged(IN_PYTHON, 1, 0, late=False)
        if dist.get_rank() == 0:
            group().send(np.ones(3), 1)
            return
        x = np.zeros(3)
        assert group().recv(x, 0) == 0
        with pytest.raises(dist.RankFailedError, match="rank 0"):
            group().recv(x, 0, timeout=30.0)
        with pytest.raises(dist.RankFailedError, match="rank 0"):
            group().send(x, 0, timeout=30.0)

    run_ranks(program, 2, backend="shm")


@pytest.mark.parametrize(
    "arguments",
    [
        *[(np.zeros(3), value) for value in (-1, 2, 1.0, "1")],
        *[(np.zeros(3), 1, tag) for tag in (-1, 2**32, 1.0, "1")],
        *[(value, 1) for value in (None, 1.5, [1.0], np.zeros(3, object))],
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["send", "recv"])
def test_strange_messages_end_the_same(kind: str, arguments: tuple[Any, ...]) -> None:
    def program() -> None:
        exchanged(IN_PYTHON, 1, 0, late=False)
        found = []
        for timeout in (0.5, "500ms"):
            with pytest.raises((TypeError, ValueError)) as raised:
                getattr(group(), kind)(*arguments, timeout=timeout)
            found.append((type(raised.value), str(raised.value)))
        assert found[0] == found[1]

    run_ranks(program, 2, backend="shm")
