"""Promises of the shared-memory transport alone, with ranks as threads."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._calls.call import Call
from transport._calls.header import CallHeader, Kind
from transport._choosing.choice import DEFAULT
from transport._communicators.backends import lookup
from transport._communicators.runtime import Membership, Runtime
from transport._errors import (
    AuthenticationError,
    CommunicatorAbortedError,
    DistError,
    DistNetworkError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._net.auth import authenticate
from transport._operands.reduce_op import ReduceOp, premul_sum
from transport._place import Place
from transport._shm import ShmCommunicator
from transport._shm.meeting.endpoint import ShmEndpoint
from transport._shm.sizes import Sizes
from transport._shm.support import the_core
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline

SMALL = Sizes(block=1 << 10, direct=64, ring=1 << 10)


def make(membership: Membership, _table: object) -> ShmCommunicator:
    return ShmCommunicator(membership, SMALL)


SHM = Transport("shm", make, has_links=False)
SHM_WIDE = Transport("shm", lambda membership, _: ShmCommunicator(membership), has_links=False)


def test_the_registry_knows_it() -> None:
    assert lookup("SHM").load() is ShmCommunicator


@pytest.mark.parametrize("count", [4, 3000])
def test_members_that_disagree_about_the_root_raise_by_the_next_barrier(count: int) -> None:
    """Two roots that wait for nobody: each believes that its broadcast has been received."""
    gate = threading.Barrier(3, timeout=LONG)
    roots = (2, 1, 2)

    def body(member: Member) -> None:
        buffer = np.full(count, member.rank, np.float32)
        root = roots[member.rank]

        def broadcast_and_barrier() -> None:
            call = member.call(Kind.BROADCAST, buffer.dtype, count, root=root)
            member.comm.broadcast(call, buffer, root)
            member.barrier()

        with pytest.raises(HeaderMismatchError, match=r"root=1.*root=2|root=2.*root=1"):
            broadcast_and_barrier()
        gate.wait()

    run_group(SHM, 3, body)


def test_roots_that_disagree_raise_although_they_never_meet() -> None:
    """Calls in which a root waits for nobody cannot go on for ever without a comparison."""

    def body(member: Member) -> None:
        buffer = np.zeros(4, np.float32)

        def broadcast_on() -> None:
            for _ in range(10):
                call = member.call(Kind.BROADCAST, buffer.dtype, 4, root=member.rank)
                member.comm.broadcast(call, buffer, member.rank)

        with pytest.raises(HeaderMismatchError):
            broadcast_on()

    run_group(SHM, 2, body)


def test_a_root_runs_ahead_of_slow_members_and_overwrites_nothing() -> None:
    count = 40

    def body(member: Member) -> None:
        for i in range(count):
            if member.rank == 2 and i % 5 == 0:
                time.sleep(0.01)
            size = (3, 700)[i % 2]  # one block, several blocks
            buffer = np.full(size, i if member.rank == 0 else -1, np.float32)
            call = member.call(Kind.BROADCAST, buffer.dtype, size, root=0)
            member.comm.broadcast(call, buffer, 0)
            assert (buffer == i).all()
            outputs = [np.empty(size, np.float32) for _ in range(3)] if member.rank == 0 else None
            call = member.call(Kind.GATHER, buffer.dtype, root=0)
            member.comm.gather(call, outputs, buffer + member.rank, 0)
            for rank, output in enumerate(outputs or ()):
                assert (output == i + rank).all()

    run_group(SHM, 3, body)


@pytest.mark.parametrize("leave", ["close", "abort"])
@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.ALL_REDUCE, Kind.ALL_GATHER])
def test_a_peer_that_leaves_in_the_middle_of_a_transfer_is_missed(leave: str, kind: Kind) -> None:
    """Rank 2 leaves while it is in calls of many blocks, over and over."""
    n, size = 3, 200_000

    def endless(member: Member) -> None:
        buffer = np.zeros(size, np.float32)
        outputs = [np.zeros(size, np.float32) for _ in range(n)]
        while True:
            if kind is Kind.BROADCAST:
                call = member.call(kind, buffer.dtype, size, root=0)
                member.comm.broadcast(call, buffer, 0)
            elif kind is Kind.ALL_GATHER:
                member.comm.all_gather(member.call(kind, buffer.dtype), outputs, buffer)
            else:
                member.all_reduce(buffer, ReduceOp.MAX)

    def body(member: Member) -> None:
        if member.rank == 2:
            act: Any = getattr(member.comm, leave)
            timer = threading.Timer(0.2, act, ["enough"] if leave == "abort" else [])
            timer.start()
            with pytest.raises(CommunicatorAbortedError):
                endless(member)
            timer.join()
        else:
            with pytest.raises(PeerLostError):
                endless(member)
            member.comm.abort("a member left")

    run_group(SHM, n, body)


def test_an_abort_wakes_who_sleeps_in_a_collective() -> None:
    woken = threading.Event()

    def body(member: Member) -> None:
        member.barrier()
        if member.rank == 0:
            threading.Timer(0.2, member.comm.abort, ["enough"]).start()
            with pytest.raises(CommunicatorAbortedError, match="enough"):
                member.barrier()
            woken.set()
        elif member.rank == 1:
            assert woken.wait(LONG)

            def go_on() -> None:
                for _ in range(2):  # rank 0 has come to the first one
                    member.barrier()

            with pytest.raises(PeerLostError) as lost:
                go_on()
            assert lost.value.peer == 0

    run_group(SHM, 2, body)


def test_a_failed_call_leaves_the_communicator_unusable() -> None:
    def body(member: Member) -> None:
        with pytest.raises(HeaderMismatchError):
            member.all_reduce(np.ones(3 + member.rank), ReduceOp.SUM)
        with pytest.raises(CommunicatorAbortedError, match="an earlier call failed"):
            member.barrier()

    run_group(SHM, 2, body)


def test_groups_of_one_process_are_apart() -> None:
    store = HashStore()
    runtimes = [Runtime(b"s"), Runtime(b"s")]

    def member(rank: int, group: str, value: float) -> float:
        membership = Membership(
            group, rank, (0, 1), PrefixStore(group, store.clone()), runtimes[rank]
        )
        comm = ShmCommunicator(membership)
        buffer = np.array([value])
        Member(comm).all_reduce(buffer, ReduceOp.SUM)
        comm.close()
        return float(buffer[0])

    jobs = [lambda r=r, g=g: member(r, f"group-{g}", 10.0**g) for g in (0, 1) for r in (0, 1)]
    assert run_threads(jobs) == [2.0, 2.0, 20.0, 20.0]
    for runtime in runtimes:
        runtime.close()
    store.close()


def _pair(secrets: tuple[bytes, bytes]) -> list[Any]:
    """The outcome of a barrier of two members with different secrets."""
    store, group = HashStore(), uuid.uuid4().hex

    def member(rank: int) -> Any:
        runtime = Runtime(secrets[rank])
        membership = Membership(group, rank, (0, 1), store.clone(), runtime)
        comm = ShmCommunicator(membership, SMALL)
        call = Call(CallHeader(1, 0, -1, Kind.BARRIER, 0, 0), Deadline.after(LONG))
        try:
            comm.barrier(call)
        except DistError as error:
            return error
        finally:
            comm.close()
            runtime.close()
        return None

    try:
        return run_threads([lambda: member(0), lambda: member(1)])
    finally:
        store.close()


def test_a_member_with_another_secret_gets_no_memory() -> None:
    results = _pair((b"right", b"wrong"))
    assert isinstance(results[1], AuthenticationError | PeerLostError)
    assert results[0] is not None


def test_a_member_on_another_host_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter(("here", "there"))

    def place(address: bytes) -> Place:
        return Place(next(machines), address=address.hex())

    monkeypatch.setattr("transport._shm.meeting.directory.this_place", place)
    for result in _pair((b"s", b"s")):
        assert isinstance(result, DistNetworkError)
        assert "cannot share memory" in str(result)
        assert "'tcp' or 'auto'" in str(result)


def test_a_stranger_gets_nothing_from_an_endpoint_and_disturbs_nobody() -> None:
    endpoint = ShmEndpoint(b"secret")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(endpoint.address)
            stranger.send(b"give me everything".ljust(42))
            stranger.settimeout(LONG)
            assert stranger.recv(100) == b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(endpoint.address)
            with pytest.raises(AuthenticationError):
                authenticate(stranger, b"guess", Deadline.after(LONG), initiator=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as member:
            member.connect(endpoint.address)
            authenticate(member, b"secret", Deadline.after(LONG), initiator=True)
            member.send(b"nonsense")
            member.settimeout(LONG)
            assert member.recv(100) == b""
    finally:
        endpoint.close()


def test_memory_is_bounded_however_many_members_there_are() -> None:
    core = the_core()
    for size in (2, 3, 8, 64, 256, 1024):
        nbytes, block = core.measure_group(size, 0)
        assert nbytes < (24 << 20 if size <= 256 else 400 << 20)
        assert 4 * size * block < nbytes
    with pytest.raises(ValueError, match="2 to 1024 members, got 1025"):
        core.measure_group(1025, 0)


def test_threads_may_send_to_one_member_at_the_same_time() -> None:
    threads, count = 4, 25

    def body(member: Member) -> None:
        peer = 1 - member.rank

        def send(tag: int) -> None:
            for i in range(count):
                member.send(np.full(100 + 13 * i, i * 10 + tag, np.int64), peer, tag)

        def receive(tag: int) -> None:
            for i in range(count):
                got = np.zeros(100 + 13 * i, np.int64)
                member.recv(got, peer, tag)
                assert (got == i * 10 + tag).all()

        jobs = [lambda t=t: send(t) for t in range(threads)]
        run_threads([*jobs, *(lambda t=t: receive(t) for t in range(threads))])

    run_group(SHM, 2, body, DEFAULT)


def test_a_long_array_of_small_floats_is_scaled_and_reduced() -> None:
    def body(member: Member) -> None:
        for count in (100, 5000):
            buffer = np.full(count, 3 + member.rank, np.float16)
            member.all_reduce(buffer, premul_sum(0.5))
            assert (buffer == 3.5).all()

    run_group(SHM_WIDE, 2, body)
