"""The memory that a mailbox keeps after a receive, and the threads that it wakes."""

from __future__ import annotations

import gc
import selectors
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from tests.support.net.tcp_pairs import sockets
from tests.support.transport.rank_threads import LONG, Member, Transport, run_group, run_threads
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import CallHeader, Kind
from transport._communicators.runtime import Membership, Runtime
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    PeerLostError,
)
from transport._links.incoming import IncomingMessage, PendingReceive
from transport._links.mailbox import Mailbox
from transport._operands.reduce_op import Flat
from transport._shm import ShmCommunicator
from transport._store.hash_store import HashStore
from transport._tcp.frame import pack_prefix
from transport._tcp.inbox import MessageWorker
from transport._tcp.messages import MessageLink
from transport._waiting.deadline import Deadline

HEADER = CallHeader(0, 3, -1, Kind.RECV, dtype_code(np.dtype(np.float64)), 0)


@pytest.mark.parametrize("waits", ["for the message", "for its bytes"])
def test_a_received_array_is_not_kept_until_the_collector_runs(waits: str) -> None:
    mailbox = Mailbox(Membership("g", 0, (0, 1), HashStore(), Runtime(secret=b"s")))
    payload = np.arange(3.0).view(np.uint8)
    stored = mailbox.begin(1, HEADER, payload.nbytes) if waits == "for its bytes" else None
    arrays: list[weakref.ref[Flat]] = []

    def receive() -> None:
        buffer = np.zeros(3)
        arrays.append(weakref.ref(buffer))
        assert mailbox.recv(Call(HEADER, Deadline.after(LONG)), buffer, 1, 0) == 1
        assert buffer.tolist() == [0.0, 1.0, 2.0]

    def deliver() -> None:
        deadline = Deadline.after(LONG)
        while not (mailbox.receiving if stored else mailbox.awaits(1)):
            assert not deadline.expired
            time.sleep(0.001)
        incoming = stored or mailbox.begin(1, HEADER, payload.nbytes)
        incoming.buffer[:] = payload
        incoming.complete()

    gc.collect()
    gc.disable()
    try:
        run_threads([receive, deliver])
        assert arrays[0]() is None
    finally:
        gc.enable()


def test_who_slept_while_another_thread_took_in_a_loss_becomes_the_carrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleeps = threading.Semaphore(0)
    sleep = Mailbox._sleep

    def counted(self: Mailbox, call: Call, receive: PendingReceive) -> None:
        sleeps.release()
        sleep(self, call, receive)

    taken_in, received = threading.Event(), threading.Event()

    def body(member: Member) -> None:
        if member.rank == 1:
            assert taken_in.wait(LONG)
            member.send(np.arange(3.0), 0, 7)
        if member.rank != 0:
            assert received.wait(LONG)  # a member that leaves would be a rescue
            return
        mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]
        carry = mailbox._carry

        def slow_carry(wait: bool) -> bool:
            # The receiver was woken, found this thread carrying, and sleeps again.
            assert sleeps.acquire(timeout=LONG)
            with mailbox._lock:
                mailbox._carry = carry
            return carry(wait)

        carrying = threading.Event()

        def receive() -> None:
            assert carrying.wait(LONG)
            assert member.recv(np.zeros(3), 1, 7, timeout=LONG / 4) == 1
            received.set()

        def take_in() -> None:
            assert mailbox._try_carrying()
            carrying.set()
            assert sleeps.acquire(timeout=LONG)
            with mailbox._lock:  # it sleeps
                mailbox._ending[2] = PeerLostError("rank 2 left", 2)
                mailbox._endings_changed = True
            mailbox._carry = slow_carry
            mailbox._stop_carrying()
            taken_in.set()

        monkeypatch.setattr(Mailbox, "_sleep", counted)
        run_threads([receive, take_in], LONG)

    run_group(
        Transport("shm", lambda membership, _: ShmCommunicator(membership), has_links=False),
        3,
        body,
    )


class TestABufferThatWasTakenBack:
    """Once a receive has raised, its array is the caller's again, whatever still comes."""

    @pytest.mark.parametrize("end", ["deadline", "abort"])
    def test_is_not_written_to(self, end: str) -> None:
        mailbox = Mailbox(Membership("g", 0, (0, 1), HashStore(), Runtime(secret=b"s")))
        buffer, payload = np.zeros(3), np.arange(1.0, 4.0).view(np.uint8)
        incoming: list[IncomingMessage] = []

        def begin() -> None:
            while not mailbox.awaits(1):
                time.sleep(0.001)
            incoming.append(mailbox.begin(1, HEADER, payload.nbytes))
            with incoming[0].guard:
                incoming[0].buffer[:8] = payload[:8]
            if end == "abort":
                mailbox.abort("the test wants it")
            else:
                _expire(deadline, mailbox)

        deadline = Deadline.after(LONG)

        def receive() -> None:
            with pytest.raises((CommunicatorTimeoutError, CommunicatorAbortedError)):
                mailbox.recv(Call(HEADER, deadline), buffer, 1, 0)

        run_threads([begin, receive])
        assert buffer.tolist() == [1.0, 0.0, 0.0]
        with incoming[0].guard:
            incoming[0].buffer[8:] = payload[8:]
        incoming[0].complete()
        assert buffer.tolist() == [1.0, 0.0, 0.0]

    @pytest.mark.parametrize("src", [1, None], ids=["from its sender", "from anyone"])
    def test_by_a_reader_of_connections(self, src: int | None) -> None:
        """Over TCP, where the message goes from the socket to where it belongs."""
        mailbox = Mailbox(Membership("g", 0, (0, 1), HashStore(), Runtime(secret=b"s")))
        count = 1 << 15
        first, second = np.zeros(count), np.zeros(count)
        header = HEADER._replace(elements=count)
        sent = Call(header._replace(kind=Kind.SEND), Deadline.after(LONG))
        wire = pack_prefix(sent, 8 * count) + _ones(count)
        worker = MessageWorker(mailbox, _ignore, _ignore, _ignore)
        with sockets() as (ours, theirs):
            link = MessageLink(ours, 1, "rank 1", worker, mailbox)
            worker.add(link)

            def send_half() -> None:
                while not mailbox.awaits(1):
                    time.sleep(0.001)
                theirs.sendall(wire[: len(wire) // 2])
                while not first.any():
                    worker.serve(0.001)
                _expire(deadline, mailbox)

            deadline = Deadline.after(LONG)

            def receive() -> None:
                with pytest.raises(CommunicatorTimeoutError):
                    mailbox.recv(Call(header, deadline), first, src, 0)

            def receive_again() -> None:
                assert mailbox.recv(Call(header, Deadline.after(LONG)), second, src, 0) == 1

            def send_rest() -> None:
                theirs.sendall(wire[len(wire) // 2 :] + wire)
                while not mailbox.left_over() and not second.all():
                    worker.serve(0.001)

            run_threads([send_half, receive])
            kept = first.copy()
            assert 0 < kept.sum() < count
            run_threads([send_rest, receive_again])
            assert second.sum() == count
            assert np.array_equal(first, kept)
            link.close()
            worker.close()
            worker.due(selectors.DefaultSelector())


def _expire(deadline: Deadline, mailbox: Mailbox) -> None:
    """Have the deadline of a receive that waits pass now."""
    deadline.at = 0.0
    with mailbox._lock:
        for wake in mailbox._asleep:
            wake.notify_all()


def _ignore(*_: object) -> None:
    pass


def _ones(count: int) -> memoryview:
    return np.ones(count).view(np.uint8).data
