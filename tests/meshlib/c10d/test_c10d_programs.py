"""Programs as c10d's users know them, with the results that they know, on NumPy arrays."""

import threading
from datetime import timedelta

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks


def test_all_reduce_of_integers_and_of_complex_numbers():
    def program():
        rank = dist.get_rank()
        x = np.arange(2, dtype=np.int64) + 1 + 2 * rank
        dist.all_reduce(x, op=dist.ReduceOp.SUM)
        z = np.array([1 + 1j, 2 + 2j], np.complex64) + 2 * rank * (1 + 1j)
        dist.all_reduce(z, op=dist.ReduceOp.SUM)
        return x.tolist(), z.tolist()

    assert run_ranks(program, 2) == [([4, 6], [4 + 4j, 6 + 6j])] * 2


def test_all_gather():
    def program():
        rank = dist.get_rank()
        boxes = [np.zeros(2, np.int64) for _ in range(2)]
        dist.all_gather(boxes, np.arange(2, dtype=np.int64) + 1 + 2 * rank)
        complexes = [np.zeros(2, np.complex64) for _ in range(2)]
        z = np.array([1 + 1j, 2 + 2j], np.complex64) + 2 * rank * (1 + 1j)
        dist.all_gather(complexes, z)
        return [x.tolist() for x in (*boxes, *complexes)]

    wanted = [[1, 2], [3, 4], [1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]]
    assert run_ranks(program, 2) == [wanted] * 2


@pytest.mark.parametrize("gather", [dist.all_gather_into_tensor, dist.all_gather_single])
def test_all_gather_into_one_array_concatenated_and_stacked(gather):
    def program():
        mine = np.arange(2, dtype=np.int64) + 1 + 2 * dist.get_rank()
        joined, stacked = np.zeros(4, np.int64), np.zeros((2, 2), np.int64)
        gather(joined, mine)
        gather(stacked, mine)
        return joined.tolist(), stacked.tolist()

    assert run_ranks(program, 2) == [([1, 2, 3, 4], [[1, 2], [3, 4]])] * 2


@pytest.mark.parametrize("scatter", [dist.reduce_scatter_tensor, dist.reduce_scatter_single])
def test_reduce_scatter_of_one_array_concatenated_and_stacked(scatter):
    def program():
        x, y = np.zeros(2, np.int64), np.zeros(2, np.int64)
        joined = np.arange(4, dtype=np.int64)
        scatter(x, joined)
        scatter(y, joined.reshape(2, 2))
        return x.tolist(), y.tolist()

    assert run_ranks(program, 2) == [([0, 2], [0, 2]), ([4, 6], [4, 6])]


def test_gather_and_scatter():
    def program():
        rank = dist.get_rank()
        x = np.ones(2) + rank
        boxes = [np.zeros_like(x) for _ in range(2)] if rank == 0 else None
        dist.gather(x, boxes, dst=0)
        out = np.zeros(2)
        dist.scatter(out, [np.ones(2), np.ones(2) * 5] if rank == 0 else None, src=0)
        return boxes and [box.tolist() for box in boxes], out.tolist()

    assert run_ranks(program, 2) == [
        ([[1.0, 1.0], [2.0, 2.0]], [1.0, 1.0]),
        (None, [5.0, 5.0]),
    ]


OBJECTS = ["foo", 12, {1: 2}]


def test_objects_to_all_and_to_one():
    def program():
        rank = dist.get_rank()
        sent = list(OBJECTS) if rank == 0 else [None, None, None]
        dist.broadcast_object_list(sent, src=0, device="cpu")
        everything = [None] * 3
        dist.all_gather_object(everything, OBJECTS[rank])
        gathered = [None] * 3
        dist.gather_object(OBJECTS[rank], gathered if rank == 0 else None, dst=0)
        mine = [None]
        dist.scatter_object_list(mine, OBJECTS if rank == 0 else [None] * 3, src=0)
        return sent, everything, gathered, mine

    for rank, result in enumerate(run_ranks(program, 3)):
        gathered = OBJECTS if rank == 0 else [None] * 3
        assert result == (OBJECTS, OBJECTS, gathered, [OBJECTS[rank]])


def test_objects_from_one_to_another():
    def program():
        if dist.get_rank() == 0:
            objects = list(OBJECTS)
            dist.send_object_list(objects, dst=1, device="cpu")
        else:
            objects = [None, None, None]
            assert dist.recv_object_list(objects, src=0, device="cpu") == 0
        return objects

    assert run_ranks(program, 2) == [OBJECTS] * 2


def test_batch_isend_irecv():
    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        sent = np.arange(2, dtype=np.float32) + 2 * rank
        received = np.random.default_rng(rank).random(2, np.float32)
        send = dist.P2POp(dist.isend, sent, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, (rank - 1 + size) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return received.tolist()

    assert run_ranks(program, 2) == [[2, 3], [0, 1]]


INPUT_SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
OUTPUT_SPLITS = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
UNEVEN = [
    [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
    [[2, 3], [13, 14], [22], [32, 33]],
    [[4], [15, 16], [23], [34, 35]],
    [[5], [17, 18], [24], [36]],
]


def test_all_to_all_single():
    def program():
        rank = dist.get_rank()
        even = np.empty(4, np.int64)
        dist.all_to_all_single(even, np.arange(4) + rank * 4)
        uneven = np.empty(sum(OUTPUT_SPLITS[rank]), np.int64)
        given = np.arange(sum(INPUT_SPLITS[rank])) + 10 * rank
        dist.all_to_all_single(uneven, given, OUTPUT_SPLITS[rank], INPUT_SPLITS[rank])
        z = np.empty(4, np.complex64)
        numbers = (np.arange(1, 5) + 4 * rank) * (1 + 1j)
        dist.all_to_all_single(z, numbers.astype(np.complex64))
        return even.tolist(), uneven.tolist(), z.real.tolist()

    for rank, (even, uneven, z) in enumerate(run_ranks(program, 4)):
        assert even == [rank, 4 + rank, 8 + rank, 12 + rank]
        assert uneven == [x for part in UNEVEN[rank] for x in part]
        assert z == [rank + 1, rank + 5, rank + 9, rank + 13]


def test_all_to_all_even_and_uneven():
    def program():
        rank = dist.get_rank()
        even = [np.empty(1, np.int64) for _ in range(4)]
        dist.all_to_all(even, np.split(np.arange(4) + rank * 4, 4))
        uneven = [np.empty(n, np.int64) for n in OUTPUT_SPLITS[rank]]
        given = np.arange(sum(INPUT_SPLITS[rank])) + 10 * rank
        dist.all_to_all(uneven, np.split(given, np.cumsum(INPUT_SPLITS[rank])[:-1]))
        return [x.tolist() for x in even], [x.tolist() for x in uneven]

    for rank, (even, uneven) in enumerate(run_ranks(program, 4)):
        assert even == [[rank], [4 + rank], [8 + rank], [12 + rank]]
        assert uneven == UNEVEN[rank]


def test_all_gather_coalesced():
    inputs = [
        [[[1, 1], [1, 1]], [2], [3, 3]],
        [[[3, 3], [3, 3]], [5], [1, 1]],
    ]

    def program():
        mine = [np.array(x) for x in inputs[dist.get_rank()]]
        outs = [[-np.ones_like(x) for x in mine] for _ in range(2)]
        dist.all_gather_coalesced(outs, mine)
        return [[x.tolist() for x in row] for row in outs]

    assert run_ranks(program, 2) == [inputs] * 2


def test_a_future_averages_gradients():
    def program():
        bucket = np.full(4, dist.get_rank() + 1.0)
        bucket /= dist.get_world_size()
        future = dist.all_reduce(bucket, group=dist.group.WORLD, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * 10).wait()

    assert run_ranks(program, 2) == [15.0, 15.0]


def test_messages_with_and_without_waiting():
    def program():
        x = np.zeros((4, 4))
        if dist.get_rank() == 0:
            x[:] = np.arange(16).reshape(4, 4)
            dist.send(tensor=x, dst=1)
            request = dist.isend(tensor=x, dst=1)
        else:
            assert dist.recv(tensor=x, src=0) == 0
            x[:] = 0
            request = dist.irecv(tensor=x, src=0)
        request.wait()
        assert request.is_completed()
        return x.sum()

    assert run_ranks(program, 2) == [120.0, 120.0]


def test_a_group_of_two_of_four():
    def program():
        group = dist.new_group(ranks=[0, 1])
        x = np.full((4, 4), 1.0 + dist.get_rank())
        dist.all_reduce(x, group=group, op=dist.ReduceOp.SUM)
        return x[0, 0]

    assert run_ranks(program, 4) == [3.0, 3.0, 3.0, 4.0]


def test_monitored_barrier_tells_which_rank_has_not_come():
    done = threading.Event()

    def program():
        if dist.get_rank() == 1:
            assert done.wait(60)
            return
        with pytest.raises(dist.DistBackendError, match="rank 1 has not arrived"):
            dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        done.set()

    run_ranks(program, 2)


def test_uneven_gathers_and_a_wait_for_several():
    def program():
        rank = dist.get_rank()
        works = []
        for turn in range(3):
            outs = [np.zeros(turn + r) for r in range(2)]
            works.append((outs, dist.all_gather(outs, np.full(turn + rank, 5.0), async_op=True)))
        for outs, work in reversed(works):
            assert work.wait()
            assert all((out == 5).all() for out in outs)
        return [out.size for outs, _ in works for out in outs]

    assert run_ranks(program, 2) == [[0, 1, 1, 2, 2, 3]] * 2
