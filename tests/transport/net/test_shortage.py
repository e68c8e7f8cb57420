"""When the system gives no more, the rank that it refuses says so, and nothing else suffers."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._communicators.runtime import Membership, Runtime
from transport._errors import (
    DistBackendError,
    DistError,
    DistNetworkError,
    PeerLostError,
)
from transport._operands.reduce_op import ReduceOp
from transport._shm import ShmCommunicator
from transport._shm.meeting.endpoint import DIED, ShmEndpoint
from transport._shm.meeting.peer_connection import Packet, PeerConnection
from transport._store.hash_store import HashStore
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline

SECRET = b"secret of the tests"
SOON = LONG / 3


class Memory:
    """A communicator, as far as an endpoint knows one. What it has called ``none`` has no room."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def offer(self, what: str) -> int:
        if what == "none":
            raise OSError(24, os.strerror(24))
        return os.memfd_create(what)

    def on_gone(self, rank: int, how: str) -> None:
        pass

    def on_kick(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


@contextlib.contextmanager
def endpoint() -> Iterator[tuple[ShmEndpoint, Memory]]:
    it, memory = ShmEndpoint(SECRET), Memory()
    try:
        for group in ("g", "other"):
            it.register(group, memory)
        yield it, memory
    finally:
        it.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process without a descriptor to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def request(ours: ShmEndpoint, theirs: ShmEndpoint, what: str, group: str = "g") -> int:
    _, reply = ours.request(theirs.address, group, 0, 1, what, "rank 1")
    assert reply.wait(SOON)
    return reply.take()


def fill_backlog(address: bytes, stack: contextlib.ExitStack) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            sock.connect(address)


class TestAFullBacklog:
    def test_is_no_death(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A connecting rank is answered once the peer accepts its newcomers."""
        monkeypatch.setattr("transport._shm.meeting.endpoint._BACKLOG", 0)
        busy = threading.Event()
        with endpoint() as (ours, _), endpoint() as (theirs, _), contextlib.ExitStack() as stack:
            stack.callback(busy.set)
            theirs._errands.append(lambda: busy.wait(LONG) and None)
            theirs._loop.wake()
            fill_backlog(theirs.address, stack)
            _, reply = ours.request(theirs.address, "g", 0, 1, "memory", "rank 1")
            assert not reply.wait(0.1)
            busy.set()
            assert reply.wait(SOON)
            os.close(reply.take())

    def test_of_a_peer_that_dies_is_a_death(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(b"")
            listener.listen(0)
            with endpoint() as (ours, _), contextlib.ExitStack() as stack:
                fill_backlog(listener.getsockname(), stack)
                _, reply = ours.request(listener.getsockname(), "g", 0, 1, "memory", "rank 1")
                assert not reply.wait(0.05)
                listener.close()
                assert reply.wait(SOON)
                with pytest.raises(PeerLostError, match=DIED):
                    reply.take()


class TestNoDescriptor:
    def test_to_connect_with(self) -> None:
        with endpoint() as (ours, _), endpoint() as (theirs, _):
            with no_descriptors(), pytest.raises(DistNetworkError) as caught:
                request(ours, theirs, "memory")
            assert not isinstance(caught.value, PeerLostError)
            assert "no file descriptor left: its limit is" in str(caught.value)
            os.close(request(ours, theirs, "memory"))

    def test_to_take_memory_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel then delivers the packet without the descriptor that was in it."""
        send = PeerConnection.send

        def send_nothing_with(self: PeerConnection, message: Packet, fd: int = -1) -> None:
            send(self, message)

        with endpoint() as (ours, _), endpoint() as (theirs, _):
            with monkeypatch.context() as patch:
                patch.setattr(PeerConnection, "send", send_nothing_with)
                with pytest.raises(DistBackendError, match="its limit is"):
                    request(ours, theirs, "memory")
            os.close(request(ours, theirs, "memory"))

    def test_to_give_memory_with(self) -> None:
        """The rank that has none ends its part of the group, and both say why."""
        with endpoint() as (ours, _), endpoint() as (theirs, memory):
            with pytest.raises(PeerLostError, match=r"rank 1 has aborted.*its limit is"):
                request(ours, theirs, "none")
            deadline = Deadline.after(SOON)
            while not memory.aborted:  # the answer goes first
                assert not deadline.expired
                time.sleep(0.001)
            assert "no file descriptor left: its limit is" in memory.aborted[0]
            os.close(request(ours, theirs, "memory", "other"))

    def test_for_a_group(self) -> None:
        """The group that was one too many fails, on the rank that met the limit; others go on."""

        # Both ranks are this process: what the other opens or closes meanwhile counts as well.
        met = threading.Barrier(2, timeout=LONG)

        def body(member: Member) -> None:
            member.all_reduce(np.ones(4), ReduceOp.SUM)
            met.wait()
            if member.rank == 0:
                runtime = member.comm.membership.runtime
                store = PrefixStore("more", member.comm.membership.store)
                with no_descriptors(), pytest.raises(DistError, match="its limit is"):
                    ShmCommunicator(Membership("more", 0, (0, 1), store, runtime))
            met.wait()
            data = np.ones(4)
            member.all_reduce(data, ReduceOp.SUM)
            assert data.tolist() == [2.0] * 4

        run_group(Transport("shm", lambda membership, _: ShmCommunicator(membership)), 2, body)


def test_groups_over_shm_cost_a_member_one_descriptor_each() -> None:
    """With both members in this process, that is two for a group: the inboxes'."""
    store, groups = HashStore(), 10

    def member(rank: int) -> None:
        runtime = Runtime(SECRET, "127.0.0.1")
        comms: list[ShmCommunicator] = []
        with contextlib.ExitStack() as stack:
            stack.callback(runtime.close)
            for number in range(groups):
                name = f"g{number}"
                prefixed = PrefixStore(name, store.clone())
                comms.append(ShmCommunicator(Membership(name, rank, (0, 1), prefixed, runtime)))
                stack.callback(comms[-1].close)
            calls = [Member(comm) for comm in comms]
            data, byte = np.ones(4), np.zeros(1, np.uint8)

            def use(caller: Member) -> None:
                caller.all_reduce(data, ReduceOp.SUM)
                if rank == 0:
                    caller.send(byte, 1)
                    caller.recv(byte, 1)
                else:
                    caller.recv(byte, 0)
                    caller.send(byte, 0)

            for caller in calls:
                use(caller)
            met.wait()
            counts[rank] = sum(inode not in before for inode in memory_files())
            met.wait()

    met = threading.Barrier(2, timeout=LONG)
    counts = [0, 0]
    gc.collect()
    before = memory_files()
    run_threads([lambda: member(0), lambda: member(1)])
    assert counts == [2 * groups, 2 * groups]


def memory_files() -> list[int]:
    """Return the inode of each of this process's descriptors of shared memory."""
    found: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("/memfd:meshlib-"):
                found.append(os.stat(f"/proc/self/fd/{name}").st_ino)
    return found
