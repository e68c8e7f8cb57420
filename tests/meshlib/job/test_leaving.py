"""Ranks that leave in good order compare their last calls."""

import re
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.fast_path import Order
from meshlib._calls.members import Members
from meshlib._calls.spec import CallSpec
from meshlib._calls.state import GroupState
from meshlib._events.events import Departures, Leave
from meshlib._job.leaving import find_mismatch
from meshlib._job.world import World
from meshlib._recording.recorder import COLLECTIVE, FlightRecorder
from meshlib.testing import RankError, run_ranks
from transport._calls.header import Kind
from transport._communicators.runtime import Runtime
from transport._store.hash_store import HashStore

WAIT = 60.0
BACKENDS = ["inproc", "shm", "tcp"]


def leave_after(program, size, backend="inproc", order=None):
    """Return what each rank's leaving raised, None if nothing, after ``program(rank, group)``.

    They leave one after the other in the given ``order``, if there is one.
    """
    shared, raised = HashStore(), [None] * size
    turns = {rank: threading.Event() for rank in range(size)}
    done = threading.Barrier(size)

    def run(rank):
        store = HashStore(_shared=shared._shared)
        backends = {"cpu": backend}
        world = World(store, rank, size, runtime=Runtime(), backends=backends, timeout=WAIT).join()
        program(rank, world.default_group)
        done.wait(WAIT)
        if order is not None:
            assert turns[rank].wait(WAIT)
        try:
            world.close(linger=0.0)
        except dist.DistError as error:
            raised[rank] = error
        after = order.index(rank) + 1 if order is not None else size
        if after < size:
            turns[order[after]].set()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    if order is not None:
        turns[order[0]].set()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    return raised


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), None])
def test_a_mismatch_in_the_last_call_is_raised_by_all_that_can_be_told(backend, order):
    def program(rank, group):
        group.barrier()
        group.broadcast(np.full(4, float(rank)), 0 if rank == 0 else 1)

    raised = leave_after(program, 3, backend, order)
    errors = [error for error in raised if error is not None]
    # Rank 0 differs from the others: who comes after it, or it itself after another, can know.
    alone = {(0, 1, 2): 2, (2, 1, 0): 1, None: 1}[order]
    assert len(errors) >= alone
    assert order is None or raised[order[-1]] is not None
    for error in errors:
        assert isinstance(error, dist.CollectiveMismatchError)
        assert str(error) == str(errors[0])
        for rank, root in enumerate((0, 1, 1)):
            row = (
                rf"{rank} +call #2 broadcast dtype=float64 count=4 root={root} .*test_leaving\.py:"
            )
            assert re.search(row, str(error)), error


def pair():
    """Return the group of rank 0, which is still there, and rank 1."""
    return GroupState(None, Members("pair", (0, 1), 0, {"cpu": "inproc"}, WAIT, ""))


@pytest.mark.parametrize("root", [0, 1])
def test_who_made_more_calls_compares_those_that_both_made(root):
    records, mine, theirs = FlightRecorder(), Order(), Order()
    for header in (mine.next_header(CallSpec(Kind.BROADCAST, print, 4, 0, 12)) for _ in range(2)):
        records.open("pair", header, 32, COLLECTIVE, True, 1.0)
    theirs.next_header(CallSpec(Kind.BROADCAST, print, 4, root, 12))
    found, left = ({"pair": (order.sequence, order.history)} for order in (mine, theirs))
    error = find_mismatch(HashStore(), [pair()], found, [Departures([Leave(1, left)])], records)
    assert (error is None) == (root == 0)
    if root == 1:
        assert "rank 1 had made other calls when it left" in str(error)
        assert "(#1 of this group)" in str(error)


def test_who_leaves_after_a_thousand_with_the_same_calls_looks_at_none_of_them():
    class Members:
        id = "all"

    class Group:
        members = Members
        error = None

        def await_failure(self, timeout):
            return None

    left = Departures([Leave(rank, {"all": (7, 1), f"own-{rank}": (1, 1)}) for rank in range(1000)])
    assert find_mismatch(HashStore(), [Group()], {"all": (7, 1)}, [left], None) is None
    assert left.chains("all") == {(7, 1): list(range(1000))}
    assert not left.without("all")
    assert left.without("own-3") == left.ranks - {3}
    assert left.without("none of theirs") == left.ranks


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_ranks_with_the_same_calls_leave_in_any_order(order):
    def program(rank, group):
        for _ in range(3):
            group.all_reduce(np.ones(2))
        # What is not a collective, or no call of all, differs as it likes.
        if rank:
            group.send(np.ones(1), 0)
        else:
            for source in (1, 2):
                group.recv(np.ones(1), source)

    assert leave_after(program, 3, order=order) == [None] * 3


def test_a_rank_that_leaves_in_order_breaks_no_group_that_goes_on():
    def program(rank, group):
        group.barrier()
        if rank == 0:  # a call more, that needs nobody
            group.broadcast(np.ones(1), 0)

    assert leave_after(program, 2, "shm", (1, 0)) == [None] * 2


def test_run_ranks_raises_it():
    def program():
        dist.broadcast(np.zeros(1), 0 if dist.get_rank() == 0 else 1)

    with pytest.raises(RankError, match=r"(made|in) different calls"):
        run_ranks(program, 3, backend="shm")


def test_a_mismatch_that_was_raised_already_is_not_raised_again():
    def program():
        with pytest.raises(dist.CollectiveMismatchError):
            dist.all_reduce(np.ones(1 + dist.get_rank()))

    run_ranks(program, 2)


def test_leaving_costs_one_message_more_than_its_news():
    """The chains go with the news; the last calls, for a table that is seldom needed, are it."""
    requests = []

    class RequestLog(HashStore):
        def __init__(self, shared):
            super().__init__(_shared=shared)

        def clone(self):
            return HashStore(_shared=self._shared)

        def _request(self, op, fields):
            requests.append(op.name)
            return super()._request(op, fields)

        def _await(self, op, fields, timeout):
            requests.append(op.name)
            return super()._await(op, fields, timeout)

    shared = HashStore()._shared

    def run(rank, done):
        store = RequestLog(shared) if rank == 0 else HashStore(_shared=shared)
        world = World(
            store, rank, 2, runtime=Runtime(), backends={"cpu": "inproc"}, timeout=WAIT
        ).join()
        world.default_group.barrier()
        done.wait(WAIT)
        if rank == 0:
            requests.clear()
            world.close()
        done.wait(WAIT)
        if rank:
            world.close()

    done = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(rank, done), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert requests == ["SET", "APPEND", "ADD"]
