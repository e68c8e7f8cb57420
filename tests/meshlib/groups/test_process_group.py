"""Groups through the call queue: arrays in, results out, order, groups of some of the ranks."""

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks


def test_all_reduce_is_in_place_and_returned():
    def program():
        x = np.arange(6.0).reshape(2, 3) + dist.get_rank()
        result = dist.all_reduce(x)
        assert result is x
        return x

    for x in run_ranks(program, 3):
        np.testing.assert_array_equal(x, 3 * np.arange(6.0).reshape(2, 3) + 3)


@pytest.mark.parametrize(
    "make",
    [lambda: np.ones((4, 6))[:, ::2], lambda: np.ones((3, 4)).T],
    ids=["strided", "transposed"],
)
def test_strided_arrays_are_written_back(make):
    def program():
        x = make()
        assert dist.all_reduce(x) is x
        return x

    for x in run_ranks(program, 2):
        assert (x == 2).all()


def test_scalars_and_buffers():
    def program():
        raw = bytearray(8)
        memoryview(raw).cast("d")[0] = 1.5
        view = memoryview(raw).cast("d")
        dist.all_reduce(view)
        return dist.all_reduce(np.float64(2.0)), view[0]

    assert run_ranks(program, 2) == [(4.0, 3.0)] * 2


def test_async_calls_keep_the_order_of_issue():
    def program():
        arrays = [np.full(100, float(i)) for i in range(20)]
        works = [dist.all_reduce(x, async_op=True) for x in arrays]
        last = dist.all_reduce(np.ones(1))
        assert all(work.is_completed() for work in works)
        return [work.result()[0] for work in works], last[0]

    assert run_ranks(program, 3) == [([3.0 * i for i in range(20)], 3.0)] * 3


def test_work_can_be_waited_for_by_another_thread():
    def program():
        work = dist.all_reduce(np.ones(3), async_op=True)
        got = []
        thread = threading.Thread(target=lambda: got.append(work.result()[0]), daemon=True)
        thread.start()
        thread.join(60)
        return got

    assert run_ranks(program, 2) == [[2.0]] * 2


def test_every_collective_once():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        one = np.array([rank + 1.0])
        out = {}
        out["broadcast"] = dist.broadcast(one.copy(), src=1).tolist()
        out["reduce"] = dist.reduce(one.copy(), dst=2).tolist()
        out["all_gather"] = [
            a.tolist() for a in dist.all_gather([np.empty(1) for _ in range(size)], one)
        ]
        out["into"] = dist.all_gather_into_tensor(np.empty(size), one).tolist()
        got = dist.gather(one, [np.empty(1) for _ in range(size)] if rank == 0 else None)
        out["gather"] = got if got is None else [a.tolist() for a in got]
        parts = [np.array([10.0 * i]) for i in range(size)] if rank == 1 else None
        out["scatter"] = dist.scatter(np.empty(1), parts, src=1).tolist()
        rows = [one * (i + 1) for i in range(size)]
        out["reduce_scatter"] = dist.reduce_scatter(np.empty(1), rows).tolist()
        out["rs_tensor"] = dist.reduce_scatter_tensor(np.empty(1), np.arange(3.0)).tolist()
        outs = [np.empty(1) for _ in range(size)]
        out["all_to_all"] = [a.tolist() for a in dist.all_to_all(outs, rows)]
        out["single"] = dist.all_to_all_single(np.empty(3), rank * 10 + np.arange(3.0)).tolist()
        dist.barrier()
        return out

    for rank, out in enumerate(run_ranks(program, 3)):
        assert out["broadcast"] == [2.0]
        assert out["reduce"] == ([6.0] if rank == 2 else [rank + 1.0])
        assert out["all_gather"] == [[1.0], [2.0], [3.0]]
        assert out["into"] == [1.0, 2.0, 3.0]
        assert out["gather"] == ([[1.0], [2.0], [3.0]] if rank == 0 else None)
        assert out["scatter"] == [10.0 * rank]
        assert out["reduce_scatter"] == [6.0 * (rank + 1)]
        assert out["rs_tensor"] == [3.0 * rank]
        assert out["all_to_all"] == [[(i + 1.0) * (rank + 1)] for i in range(3)]
        assert out["single"] == [rank, 10.0 + rank, 20.0 + rank]


def test_objects():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        objects = [{"a": np.arange(3)}, "x"] if rank == 1 else [None, None]
        dist.broadcast_object_list(objects, src=1)
        everything = [None] * size
        dist.all_gather_object(everything, ("rank", rank, "é" * rank))
        gathered = [None] * size if rank == 2 else None
        dist.gather_object(rank, gathered, dst=2)
        mine = [None]
        dist.scatter_object_list(mine, ["p", "q", {"r": 1}] if rank == 0 else None, src=0)
        box = [None]
        if rank == 0:
            dist.send_object_list([b"hello"], dst=1)
        elif rank == 1:
            assert dist.recv_object_list(box) == 0
        return objects[0]["a"].tolist(), objects[1], everything, gathered, mine[0], box[0]

    results = run_ranks(program, 3)
    everything = [("rank", r, "é" * r) for r in range(3)]
    for rank, result in enumerate(results):
        assert result[:3] == ([0, 1, 2], "x", everything)
        assert result[3] == ([0, 1, 2] if rank == 2 else None)
        assert result[4] == ["p", "q", {"r": 1}][rank]
        assert result[5] == (b"hello" if rank == 1 else None)


def test_messages_any_source_and_to_oneself():
    def program():
        rank = dist.get_rank()
        box = np.zeros(2)
        if rank == 0:
            senders = {dist.recv(box) for _ in range(2)}
            own = dist.irecv(np.zeros(1), src=0, tag=9)
            dist.send(np.array([7.0]), dst=0, tag=9)
            return senders, own.result()[0], own.source_rank()
        dist.send(np.full(2, float(rank)), dst=0)
        return None

    assert run_ranks(program, 3)[0] == ({1, 2}, 7.0, 0)


def test_groups_of_some_ranks():
    def program():
        rank = dist.get_rank()
        even = dist.new_group([2, 0])
        odd = dist.new_group([1, 3])
        mine = even if rank % 2 == 0 else odd
        other = odd if rank % 2 == 0 else even
        assert other.rank() == -1
        assert dist.get_world_size(other) == -1
        assert dist.all_reduce(np.ones(1), group=other) is None
        assert dist.get_process_group_ranks(even) == [0, 2]
        assert dist.get_group_rank(even, 2) == 1
        assert dist.get_global_rank(odd, 1) == 3
        total = dist.all_reduce(np.array([float(rank)]), group=mine)
        first = dist.broadcast(np.array([float(rank)]), group=mine, group_src=1)
        return total[0], first[0]

    assert run_ranks(program, 4) == [(2.0, 2.0), (4.0, 3.0), (2.0, 2.0), (4.0, 3.0)]


def test_groups_are_made_by_their_members_alone():
    def program():
        if dist.get_rank() == 2:
            return None
        group = dist.new_group([0, 1])
        return dist.all_reduce(np.ones(1), group=group)[0]

    assert run_ranks(program, 3) == [2.0, 2.0, None]


def test_two_groups_of_the_same_ranks_are_independent():
    def program():
        a, b = dist.new_group(), dist.new_group()
        assert a is not b
        first = dist.all_reduce(np.ones(1), group=a, async_op=True)
        second = dist.all_reduce(np.full(1, 2.0), group=b)
        return first.result()[0], second[0]

    assert run_ranks(program, 2) == [(2.0, 4.0)] * 2


BAD = {
    "not an array": (lambda: dist.all_reduce([1.0]), TypeError, "tensor must be a .*; got list"),
    "object dtype": (
        lambda: dist.all_reduce(np.array([None])),
        TypeError,
        r"tensor: dtype dtype\('O'\)",
    ),
    "read-only": (
        lambda: dist.all_reduce(np.broadcast_to(1.0, 3)),
        TypeError,
        "tensor is a read-only array",
    ),
    "band on floats": (
        lambda: dist.all_reduce(np.ones(1), dist.ReduceOp.BAND),
        TypeError,
        "BAND does not apply to dtype float64",
    ),
    "min on complex": (
        lambda: dist.all_reduce(np.ones(1, complex), dist.ReduceOp.MIN),
        TypeError,
        "complex numbers have no order",
    ),
    "avg on integers": (
        lambda: dist.all_reduce(np.ones(1, int), dist.ReduceOp.AVG),
        TypeError,
        "AVG does not apply to dtype int64",
    ),
    "op": (lambda: dist.all_reduce(np.ones(1), "sum"), TypeError, "op must be a ReduceOp"),
    "no source": (lambda: dist.broadcast(np.ones(1)), ValueError, "exactly one of src"),
    "two sources": (
        lambda: dist.broadcast(np.ones(1), src=0, group_src=0),
        ValueError,
        "exactly one of src and group_src",
    ),
    "outside": (lambda: dist.broadcast(np.ones(1), src=9), ValueError, "global rank 9 is not in"),
    "list length": (
        lambda: dist.all_gather([np.ones(1)], np.ones(1)),
        ValueError,
        "tensor_list has 1 entries; expected 2",
    ),
    "entry size": (
        lambda: dist.all_gather([np.ones(3), np.ones(3)], np.ones(1)),
        ValueError,
        r"tensor_list\[\d\] has 3 elements",
    ),
    "dtypes": (
        lambda: dist.all_gather([np.ones(1, "f4"), np.ones(1, "f4")], np.ones(1)),
        TypeError,
        r"tensor_list\[0\] has dtype float32 but tensor has float64",
    ),
    "overlap": (
        lambda: dist.all_to_all_single(*[np.ones(4)] * 2),
        ValueError,
        "output overlaps input",
    ),
    "splits": (
        lambda: dist.all_to_all_single(np.ones(4), np.ones(4), [1, 2], [2, 2]),
        ValueError,
        r"output_split_sizes is \[1, 2\] \(sum 3\); expected 2 numbers >= 0 .* 4 rows",
    ),
    "rows": (
        lambda: dist.all_to_all_single(np.ones(3), np.ones(3)),
        ValueError,
        "3 rows .* 2 members cannot share",
    ),
    "tag": (lambda: dist.send(np.ones(1), dst=0, tag=-1), ValueError, "tag is -1"),
    "ranks": (lambda: dist.new_group([0, 7]), ValueError, r"ranks has \[7\]"),
    "twice": (lambda: dist.new_group([0, 0]), ValueError, r"ranks has \[0\] more than once"),
    "pickle": (
        lambda: dist.all_gather_object([None, None], lambda: 0),
        TypeError,
        "obj cannot be pickled",
    ),
    "backend": (lambda: dist.new_group(backend="tpc"), ValueError, "backend 'tpc' is unknown"),
    "group": (lambda: dist.barrier(group="dp"), TypeError, "group must be a ProcessGroup"),
}


def test_bad_arguments_are_named_and_leave_the_group_usable():
    def program():
        for call, error, match in BAD.values():
            with pytest.raises(error, match=match):
                call()
        return dist.all_reduce(np.ones(1))[0]

    assert run_ranks(program, 2) == [2.0, 2.0]


def test_run_ranks_names_the_rank_that_failed_first():
    def program():
        if dist.get_rank() == 1:
            raise KeyError("the cause")
        dist.barrier()

    with pytest.raises(RankError, match="rank 1 of 3 raised KeyError: 'the cause'") as caught:
        run_ranks(program, 3)
    assert isinstance(caught.value.__cause__, KeyError)


def test_run_ranks_leaves_no_thread():
    before = set(threading.enumerate())  # some of which may end meanwhile
    run_ranks(lambda: dist.all_reduce(np.ones(1), async_op=True).wait(), 4)
    assert not set(threading.enumerate()) - before


def test_without_init_there_is_no_group():
    with pytest.raises(ValueError, match="call init_process_group"):
        dist.all_reduce(np.ones(1))
    assert not dist.is_initialized()


def test_a_name_that_is_given_later_is_what_messages_say():
    def program():
        group = dist.new_group([0, 1])
        group.group_desc = "experts"
        return group.group_desc, "'experts'" in str(group)

    assert run_ranks(program, 2) == [("experts", True)] * 2
