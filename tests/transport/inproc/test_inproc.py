"""Promises of the inproc transport alone: meeting through the store, and bounded queues."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._calls.call import Call
from transport._calls.header import CallHeader, Kind
from transport._communicators.backends import lookup
from transport._communicators.runtime import Membership, Runtime
from transport._errors import CommunicatorAbortedError, CommunicatorTimeoutError, DistStoreError
from transport._inproc.communicator import InprocCommunicator
from transport._inproc.frame_queue import HIGH_WATER
from transport._link import exchange
from transport._operands.reduce_op import ReduceOp
from transport._store.file.store import FileStore
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline

INPROC = Transport("inproc", InprocCommunicator)


def communicator(store: HashStore, rank: int, size: int, group: str = "g") -> InprocCommunicator:
    prefixed = PrefixStore(group, store.clone())
    return InprocCommunicator(Membership(group, rank, tuple(range(size)), prefixed, Runtime()))


def call(kind: Kind = Kind.BROADCAST, timeout: float = LONG) -> Call:
    return Call(CallHeader(1, 0, 0, kind, 0, 0), Deadline.after(timeout))


def test_the_registry_knows_it() -> None:
    assert lookup("INPROC").load() is InprocCommunicator


def test_groups_with_different_names_do_not_meet() -> None:
    store = HashStore()

    def member(rank: int, group: str) -> float:
        comm = communicator(store, rank, 2, group)
        buffer = np.array([rank + 10.0 * len(group)])
        member = Member(comm)
        member.all_reduce(buffer, ReduceOp.SUM)
        comm.close()
        return float(buffer[0])

    jobs = [lambda r=r, g=g: member(r, g) for g in ("a", "bb") for r in range(2)]
    assert run_threads(jobs) == [21.0, 21.0, 41.0, 41.0]


def test_a_store_of_several_processes_is_refused(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    with pytest.raises(DistStoreError, match="HashStore"):
        InprocCommunicator(Membership("g", 0, (0, 1), store, Runtime()))
    store.close()


def test_a_rank_joins_once_until_everybody_has_left() -> None:
    store = HashStore()
    first, second = communicator(store, 0, 2), communicator(store, 1, 2)
    with pytest.raises(ValueError, match=r"rank 0 of group 'g' has already joined"):
        communicator(store, 0, 2)
    first.abort("and again")
    first.close()
    with pytest.raises(ValueError, match="already joined"):
        communicator(store, 0, 2)
    second.close()

    def again(rank: int) -> float:
        comm = communicator(store, rank, 2)
        buffer = np.ones(3)
        Member(comm).all_reduce(buffer, ReduceOp.SUM)
        comm.close()
        return float(buffer.sum())

    assert run_threads([lambda r=r: again(r) for r in range(2)]) == [6.0, 6.0]


def test_queues_are_bounded_and_the_rest_waits_for_the_receiver() -> None:
    """A sender gets ahead of its receiver by no more than the high-water mark."""
    ahead = 0

    def body(member: Member) -> None:
        block = np.zeros(50_000, np.uint8)
        other = 1 - member.rank
        if member.rank == 0:
            link = member.comm.link(other, call())

            def flood() -> None:
                nonlocal ahead
                while True:
                    link.send(call(timeout=0.2), block.data)
                    ahead += 1

            tracemalloc.start()
            try:
                with pytest.raises(CommunicatorTimeoutError, match="rank 1"):
                    flood()
                assert tracemalloc.get_traced_memory()[1] < HIGH_WATER + (1 << 19)
            finally:
                tracemalloc.stop()
        member.shared.setdefault("gate", threading.Barrier(2, timeout=LONG)).wait()

    run_group(INPROC, 2, body)
    assert HIGH_WATER // 2 < ahead * 50_000 <= HIGH_WATER


def test_a_frame_that_timed_out_is_taken_back() -> None:
    """After the error the sender may do with its memory what it likes."""

    def body(member: Member) -> None:
        gate = member.shared.setdefault("gate", threading.Barrier(2, timeout=LONG))
        link = member.comm.link(1 - member.rank, call())
        buffer = np.full(1 << 20, member.rank, np.uint8)
        if member.rank == 0:
            with pytest.raises(CommunicatorTimeoutError):
                link.send(call(timeout=0.05), buffer.data)
            gate.wait()
            buffer[:] = 7
            link.send(call(), buffer.data)
        else:
            gate.wait()
            link.recv_into(call(), buffer.data)
            assert (buffer == 7).all()

    run_group(INPROC, 2, body)


def test_a_lent_frame_outlives_an_abort_during_its_copy() -> None:
    """The sender returns only after the receiver has released its memory."""
    copying, aborted = threading.Event(), threading.Event()
    released: list[str] = []

    def body(member: Member) -> None:
        link = member.comm.link(1 - member.rank, call())
        buffer = np.zeros(1 << 20, np.uint8)
        if member.rank == 0:
            link.send(call(), buffer.data)
            released.append("sender")
            return

        def on_piece(_: int) -> None:
            if not copying.is_set():
                copying.set()
                assert aborted.wait(LONG)
                time.sleep(0.1)
                released.append("receiver")

        def abort() -> None:
            assert copying.wait(LONG)
            member.comm.abort("enough of this")
            aborted.set()

        thread = threading.Thread(target=abort)
        thread.start()
        frame_in = member.comm.link(0, call())
        # An exchange whose own direction goes nowhere: the peer never takes this frame.
        with pytest.raises(CommunicatorAbortedError, match="enough of this"):
            exchange(call(), link, buffer.copy().data, frame_in, buffer.data, on_piece)
        thread.join(LONG)

    run_group(INPROC, 2, body)
    assert released == ["receiver", "sender"]


def test_a_member_may_send_before_its_peer_exists() -> None:
    store = HashStore()
    early = communicator(store, 0, 2)
    Member(early).send(np.arange(4.0), 1, tag=3)
    late = communicator(store, 1, 2)
    got = np.zeros(4)
    assert Member(late).recv(got, 0, tag=3) == 0
    assert got.tolist() == [0.0, 1.0, 2.0, 3.0]
    early.close()
    late.close()
