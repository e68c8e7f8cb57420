"""Batches of messages: matching, all directions at once, checks before anything moves."""

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import run_ranks

BACKENDS = ["inproc", "tcp"]


def exchange_with_neighbours(elements):
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = np.arange(elements, dtype=np.float32) + 2 * rank
    received = np.empty(elements, np.float32)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
    )
    assert [work.wait() for work in works] == [True, True]
    assert works[1].source_rank() == (rank - 1) % size
    return received


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring(backend, size):
    for rank, got in enumerate(run_ranks(exchange_with_neighbours, size, 2, backend=backend)):
        np.testing.assert_array_equal(got, np.arange(2) + 2 * ((rank - 1) % size))


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_messages_in_both_directions_do_not_deadlock(backend):
    # 32 MiB: far more than any socket or queue holds.
    for rank, got in enumerate(run_ranks(exchange_with_neighbours, 2, 8 << 20, backend=backend)):
        assert got[-1] == np.float32((8 << 20) - 1 + 2 * (1 - rank))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_the_lists_does_not_matter(backend):
    def program():
        rank = dist.get_rank()
        size, n = dist.get_world_size(), 100_000
        boxes = [np.empty(n) for _ in range(size)]
        receives = [dist.P2POp(dist.irecv, boxes[i], i, tag=7) for i in range(size)]
        sends = [dist.P2POp(dist.isend, np.full(n, rank * 10.0 + i), i, tag=7) for i in range(size)]
        ops = sends + receives if rank % 2 else receives[::-1] + sends
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return [box[0] for box in boxes]

    results = run_ranks(program, 3, backend=backend)
    assert results == [[i * 10.0 + rank for i in range(3)] for rank in range(3)]


def test_groups_tags_and_ranks_in_the_group():
    def program():
        rank = dist.get_rank()
        group = dist.new_group([1, 2])
        box = np.zeros(1)
        ops = [
            dist.P2POp(dist.isend, np.array([rank + 0.5]), group=group, group_peer=2 - rank, tag=3)
            if rank
            else dist.P2POp(dist.isend, np.zeros(1), peer=1, group=group),
            dist.P2POp(dist.irecv, box, group=group, tag=3),
        ]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == (2 if rank else 0)
        for work in works:
            work.wait()
        return box[0]

    assert run_ranks(program, 3) == [0.0, 2.5, 1.5]


def test_wrong_entries_are_named_and_nothing_is_sent():
    def program():
        x, box = np.ones(1), np.zeros(1)
        peer = 1 - dist.get_rank()
        good = dist.P2POp(dist.isend, x, peer)
        with pytest.raises(ValueError, match=r"op must be meshlib\.isend or meshlib\.irecv"):
            dist.P2POp(dist.send, x, peer)
        with pytest.raises(ValueError, match="p2p_op_list must be a list with at least one"):
            dist.batch_isend_irecv([])
        with pytest.raises(TypeError, match=r"p2p_op_list\[1\] must be a P2POp"):
            dist.batch_isend_irecv([good, None])
        with pytest.raises(ValueError, match=r"p2p_op_list\[1\]: dst: global rank 5"):
            dist.batch_isend_irecv([good, dist.P2POp(dist.isend, x, 5)])
        with pytest.raises(ValueError, match=r"p2p_op_list\[1\]: exactly one of dst"):
            dist.batch_isend_irecv([good, dist.P2POp(dist.isend, x)])
        with pytest.raises(TypeError, match=r"p2p_op_list\[0\]: tensor must be .*; got list"):
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, [1.0], peer), good])
        # Had one of the good ones been sent, it would be received here.
        dist.isend(np.full(1, 7.0), peer)
        dist.recv(box, peer)
        return box[0]

    assert run_ranks(program, 2) == [7.0, 7.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_rank_sent_before_it_left_arrives(backend):
    """Both ends call each other at once, while one of them is about to leave."""

    def program():
        box = np.zeros(4)
        if dist.get_rank() == 0:
            dist.send(np.ones(4), 1)
        else:
            assert dist.recv(box, 0) == 0
        return box[0]

    for _ in range(60):
        assert run_ranks(program, 2, backend=backend) == [0.0, 1.0]
