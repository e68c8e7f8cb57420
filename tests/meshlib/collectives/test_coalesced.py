"""Coalesced collectives: values, one set of messages for all arrays, mismatches."""

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from transport._inproc.communicator import InprocCommunicator

SHAPES = [(), (3,), (2, 2), (0,), (5, 1)]


class Counter:
    """Frames and bytes that all ranks of a test sent."""

    def __init__(self):
        self._lock = threading.Lock()
        self.frames = 0

    def count(self):
        with self._lock:
            self.frames += 1


COUNTER = Counter()


class CountingCommunicator(InprocCommunicator):
    """Counts each use of a link, two of which an exchange makes."""

    def link(self, peer, call):
        COUNTER.count()
        return super().link(peer, call)


dist.Backend.register_backend("counting", CountingCommunicator)


def arrays(rank, dtype="f8"):
    return [np.full(shape, rank + i + 1).astype(dtype) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG])
def test_all_reduce_coalesced(size, async_op, op):
    def program():
        xs = arrays(dist.get_rank())
        got = dist.all_reduce_coalesced(xs, op, async_op=async_op)
        got = got.result() if async_op else got
        assert all(a is b for a, b in zip(got, xs, strict=True))
        return got

    combine = {"SUM": np.sum, "MAX": np.max, "AVG": np.mean}[op.kind.name]
    for got in run_ranks(program, size):
        for i, (x, shape) in enumerate(zip(got, SHAPES, strict=True)):
            assert x.shape == shape
            assert (x == combine(np.arange(size) + i + 1)).all()


def test_strided_arrays_and_small_floats():
    def program():
        xs = [np.ones((4, 4), np.float16)[::2, ::2], np.ones((2, 3), np.float16).T]
        dist.all_reduce_coalesced(xs)
        return xs

    for xs in run_ranks(program, 3):
        assert all((x == 3).all() for x in xs)


def test_the_coalesced_form_sends_as_much_as_one_call():
    def frames(program):
        COUNTER.frames = 0
        run_ranks(program, 3, backend="counting")
        return COUNTER.frames

    many = frames(lambda: [dist.all_reduce(np.ones(4)) for _ in range(8)])
    one = frames(lambda: dist.all_reduce(np.ones(32)))
    assert one > 0
    assert frames(lambda: dist.all_reduce_coalesced([np.ones(4), *arrays(0)])) == one
    assert many == 8 * one
    gathered = frames(lambda: dist.all_gather([np.empty(8) for _ in range(3)], np.ones(8)))

    def coalesced():
        outs = [[np.empty(4), np.empty(4)] for _ in range(3)]
        dist.all_gather_coalesced(outs, [np.ones(4), np.ones(4)])

    assert frames(coalesced) == gathered


@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_coalesced_with_uneven_sizes(async_op):
    def own(rank):
        return [np.full((2, 2), rank), np.full(rank + 1, 10 + rank), np.array(100 + rank)]

    def program():
        size, rank = dist.get_world_size(), dist.get_rank()
        outs = [[np.full_like(x, -1) for x in own(i)] for i in range(size)]
        got = dist.all_gather_coalesced(outs, own(rank), async_op=async_op)
        got = got.result() if async_op else got
        assert got[0][0] is outs[0][0]
        return outs

    for outs in run_ranks(program, 3):
        for rank, row in enumerate(outs):
            for x, wanted in zip(row, own(rank), strict=True):
                np.testing.assert_array_equal(x, wanted)


def test_other_sizes_with_the_same_total_are_a_mismatch():
    def program():
        sizes = (1, 3) if dist.get_rank() else (2, 2)
        with pytest.raises(dist.CollectiveMismatchError, match="sizes="):
            dist.all_reduce_coalesced([np.ones(n) for n in sizes])

    run_ranks(program, 2)


BAD = {
    "no list": (lambda: dist.all_reduce_coalesced(np.ones(2)), TypeError, "tensors must be a list"),
    "empty": (lambda: dist.all_reduce_coalesced([]), ValueError, "tensors is empty"),
    "dtypes": (
        lambda: dist.all_reduce_coalesced([np.ones(1), np.ones(1, "f4")]),
        TypeError,
        r"tensors\[1\] has dtype float32 but tensors\[0\] has float64",
    ),
    "shared": (
        lambda: dist.all_reduce_coalesced([np.ones(3)] * 2),
        ValueError,
        "tensors has entries that share memory",
    ),
    "rows": (
        lambda: dist.all_gather_coalesced([[np.ones(1)]], [np.ones(1)]),
        ValueError,
        "output_tensor_lists has 1 entries; expected 2",
    ),
    "own row": (
        lambda: dist.all_gather_coalesced([[np.ones(1)], [np.ones(1)]], [np.ones(1), np.ones(1)]),
        ValueError,
        r"output_tensor_lists\[\d\] has 1 entries; expected 2",
    ),
    "own size": (
        lambda: dist.all_gather_coalesced([[np.ones(2)], [np.ones(2)]], [np.ones(1)]),
        ValueError,
        r"output_tensor_lists\[\d\]\[0\] has 2 elements .* the size of input_tensor_list\[0\]",
    ),
    "same outputs": (
        lambda: dist.all_gather([np.ones(2)] * 2, np.ones(2)),
        ValueError,
        "tensor_list has entries that share memory",
    ),
}


def test_bad_arguments_leave_the_group_usable():
    def program():
        for call, error, match in BAD.values():
            with pytest.raises(error, match=match):
                call()
        return dist.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_a_rank_outside_gets_none():
    def program():
        group = dist.new_group([0])
        got = dist.all_reduce_coalesced([np.ones(1)], group=group)
        lists = dist.all_gather_coalesced([[np.empty(1)]], [np.ones(1)], group=group)
        return got is None, lists is None

    assert run_ranks(program, 2) == [(False, False), (True, True)]


@pytest.mark.parametrize("async_op", [False, True])
def test_into_tensor_forms_of_several(async_op):
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        ins = [np.full(3, float(rank)), np.full((2, 2), 10.0 + rank)]
        outs = [np.empty(3 * size), np.empty((size, 2, 2))]
        got = dist.all_gather_into_tensor_coalesced(outs, ins, async_op=async_op)
        got = got.result() if async_op else got
        assert all(a is b for a, b in zip(got, outs, strict=True))
        np.testing.assert_array_equal(outs[0], np.repeat(np.arange(size), 3))
        np.testing.assert_array_equal(outs[1][:, 1, 1], 10 + np.arange(size))

        wholes = [np.arange(2.0 * size) + rank, np.arange(3.0 * size).reshape(size, 3)]
        parts = [np.empty(2), np.empty((1, 3))]
        op = dist.ReduceOp.MAX
        got = dist.reduce_scatter_tensor_coalesced(parts, wholes, op, async_op=async_op)
        got = got.result() if async_op else got
        np.testing.assert_array_equal(parts[0], np.arange(2) + 2 * rank + size - 1)
        np.testing.assert_array_equal(parts[1], wholes[1][rank : rank + 1])

    run_ranks(program, 3)


def test_into_tensor_forms_of_several_need_sizes_that_fit():
    def program():
        with pytest.raises(ValueError, match=r"output_tensors\[1\] has 2 elements.*2 times"):
            dist.all_gather_into_tensor_coalesced(
                [np.empty(2), np.empty(2)], [np.ones(1), np.ones(2)]
            )
        with pytest.raises(ValueError, match=r"input_tensors\[0\] has 3 elements.*2 times"):
            dist.reduce_scatter_tensor_coalesced([np.empty(1)], [np.ones(3)])
        with pytest.raises(TypeError, match=r"input_tensors must be a list"):
            dist.all_gather_into_tensor_coalesced([np.empty(2)], np.ones(1))

    run_ranks(program, 2)


def test_one_work_of_several():
    def program():
        rank = dist.get_rank()
        works = [dist.all_reduce(np.full(2, float(i)), async_op=True) for i in range(3)]
        whole = dist.collect_all([*works, None])
        follows = whole.get_future().then(
            lambda done: [x[0] for x in done.value()] + [dist.all_reduce(np.ones(1))[0]]
        )
        assert follows.wait(60) == [0.0, 2.0, 4.0, 2.0]
        assert whole.wait(60)
        assert whole.is_success()
        late = dist.collect_all([dist.irecv(np.zeros(1), 1 - rank)])
        with pytest.raises(TimeoutError, match=r"all of .*recv"):
            late.wait(0.01)
        dist.barrier()  # no rank sends before both have waited in vain
        dist.send(np.ones(1), 1 - rank)
        assert late.result()[0][0] == 1

    run_ranks(program, 2)


def test_one_work_of_several_raises_what_failed():
    def program():
        groups = [dist.new_group(), dist.new_group()]
        works = [
            groups[0].all_reduce(np.ones(1), async_op=True),
            groups[1].all_reduce(np.ones(1 + dist.get_rank()), async_op=True),
        ]
        with pytest.raises(dist.CollectiveMismatchError):
            dist.collect_all(works).wait(60)
        for bad, error in (((), ValueError), ([None], ValueError), ([1], TypeError)):
            with pytest.raises(error, match="works"):
                dist.collect_all(bad)
        with pytest.raises(TypeError, match=r"works\[1\] must be a Future"):
            dist.collect_all([works[0].get_future(), works[1]])
        good, bad = dist.collect_all([work.get_future() for work in works]).wait(60)
        assert good.wait()[0] == 2
        assert isinstance(bad.exception(), dist.CollectiveMismatchError)

    run_ranks(program, 2)
