"""Messages enter by compiled code where there is one: as by Python's, and with its records."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.call_stream import CallStream
from meshlib._calls.call_streams import CallStreams
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world
from meshlib._native import calls as native
from meshlib.testing import run_ranks
from transport._calls.header import Kind

NEEDS_CORE = pytest.mark.skipif(native is None, reason="there is no compiled core here")


def group():
    return current_world().default_group


def pass_on(x, tag=0):
    """Send ``x`` on in a ring of ranks, and return what came."""
    got, rank, size = np.zeros_like(x), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.send(x, 1, tag=tag)
        dist.recv(got, size - 1, tag=tag)
    else:
        dist.recv(got, rank - 1, tag=tag)
        dist.send(x, (rank + 1) % size, tag=tag)
    return got


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_the_records_are_the_same_by_both_doors(backend):
    def rank():
        found = []
        for open_again in (False, True):
            call_queue_of(group()).state.fast_path = None
            if open_again:
                pass_on(np.zeros(1))  # after which the core opens the next ones
            before = len(current_world().recorder.records())
            pass_on(np.arange(3.0), tag=5)
            dist.all_reduce(np.ones(3))
            records = current_world().recorder.records()[before:]
            found.append(
                [
                    (
                        r.header.what._replace(sequence=0),
                        r.peer,
                        r.nbytes,
                        r.sync,
                        bool(r.ended),
                        r.site,
                    )
                    for r in records
                ]
            )
            messages = [r.header.sequence for r in records if r.kind in {"send", "recv"}]
            assert messages == list(range(messages[0], messages[0] + 2))
        fast_path = call_queue_of(group()).state.fast_path
        assert (fast_path is None) == (native is None)
        return found

    for found in run_ranks(rank, 3, backend=backend):
        assert found[0] == found[1]
        assert all("test_compiled_messages" in record[-1] for record in found[0])


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_a_tag_that_never_comes_again_leaves_nothing_behind(backend):
    def streams():
        gc.collect()
        return sum(isinstance(one, CallStream) for one in gc.get_objects())

    def rank():
        pass_on(np.zeros(1))
        dist.barrier()
        before = streams()
        dist.barrier()
        for tag in range(1, 1001):
            pass_on(np.ones(1), tag)
        dist.barrier()
        after = streams()
        dist.barrier()
        assert after - before <= 2 * 300  # of two ranks; without a bound, 2000
        return float(pass_on(np.ones(1), 7)[0])

    assert run_ranks(rank, 2, backend=backend) == [1.0, 1.0]


@NEEDS_CORE
def test_the_compiled_door_knows_the_lane_of_sends_under_any_tag(monkeypatch):
    kinds = []
    original = CallStreams.of_peer

    def of_peer(self, kind, peer, tag, /):
        kinds.append(kind)
        return original(self, kind, peer, tag)

    monkeypatch.setattr(CallStreams, "of_peer", of_peer)

    def rank():
        for _ in range(2):
            for tag in range(40):
                pass_on(np.ones(1), tag)

    run_ranks(rank, 2, backend="tcp")
    # Receives are as many streams as tags, and push that of the sends out now and then.
    assert kinds.count(Kind.RECV) >= 2 * 2 * 39
    assert 2 <= kinds.count(Kind.SEND) <= 20


@NEEDS_CORE
def test_collectives_are_left_to_python_until_the_members_have_met():
    def rank():
        met = [call_queue_of(group()).state.fast_path]
        for call in (lambda: pass_on(np.ones(2)), dist.barrier):
            call()
            fast_path = call_queue_of(group()).state.fast_path
            assert fast_path is not None
            met.append(fast_path.met)
        return met

    assert run_ranks(rank, 2, backend="shm") == [[None, False, True]] * 2


def test_under_many_tags_each_message_finds_its_receive():
    def rank():
        pass_on(np.zeros(1))
        for tag in (*range(40), *reversed(range(40)), *[7] * 3):
            x = np.full(2, float(tag))
            assert np.array_equal(pass_on(x, tag), x)
        return call_queue_of(group()).streams.is_idle()

    assert run_ranks(rank, 2) == [True] * 2


def test_a_receive_that_fails_gives_its_turn_back():
    def rank():
        pass_on(np.zeros(1))
        if dist.get_rank() == 0:
            dist.send(np.ones(2), 1)
            dist.send(np.ones(3), 1)
            return None
        with pytest.raises(dist.CollectiveMismatchError, match="2 elements"):
            dist.recv(np.zeros(5), 0)
        got = np.zeros(3)
        assert dist.recv(got, 0) == 0
        return got.tolist()

    assert run_ranks(rank, 2)[1] == [1.0] * 3


def test_an_interrupt_in_a_message_leaves_no_turn_taken(monkeypatch):
    both = threading.Barrier(2)  # a barrier of the group can end at one rank while the other fails

    def rank():
        pass_on(np.zeros(1))
        both.wait(60)
        if dist.get_rank() == 0:
            communicator = call_queue_of(group()).state.communicators["cpu"]

            def interrupt(*_):
                raise KeyboardInterrupt

            monkeypatch.setattr(communicator, "recv", interrupt)
            with pytest.raises(KeyboardInterrupt):
                dist.recv(np.zeros(1), 1)
            assert call_queue_of(group()).state.fast_path is None
            assert call_queue_of(group()).streams.is_idle()
        with pytest.raises(dist.RankFailedError, match="KeyboardInterrupt"):
            dist.recv(np.zeros(1), 1 - dist.get_rank())
        return call_queue_of(group()).streams.is_idle()

    assert run_ranks(rank, 2) == [True] * 2


def test_a_call_waits_for_those_before_it_under_its_tag():
    def rank():
        pass_on(np.zeros(1))
        if dist.get_rank() == 0:
            dist.recv(np.zeros(1), 1)
            for value in range(3):
                dist.send(np.full(1, float(value)), 1)
            return None
        arrays = [np.zeros(1) for _ in range(3)]
        works = [dist.irecv(x, 0) for x in arrays[:2]]
        dist.send(np.ones(1), 0)
        dist.recv(arrays[2], 0)
        assert all(work.is_completed() for work in works)
        return [float(x[0]) for x in arrays]

    assert run_ranks(rank, 2)[1] == [0.0, 1.0, 2.0]
