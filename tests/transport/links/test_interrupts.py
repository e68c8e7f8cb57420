"""Ctrl-C in the middle of a wait: no lock stays taken, and nobody else's is released."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from meshlib._calls import call_stream, future, work
from meshlib._calls.call_stream import CallStream
from tests.support.transport import interrupts as interruptions
from tests.support.transport.interrupts import SOON
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import CallHeader, Kind
from transport._communicators.runtime import Membership, Runtime
from transport._errors import CommunicatorTimeoutError
from transport._inproc import frame_queue
from transport._inproc.frame_queue import FrameQueue
from transport._links import incoming
from transport._links import mailbox as mailboxes
from transport._links.mailbox import Mailbox
from transport._store.hash_store import HashStore
from transport._waiting import interrupts
from transport._waiting.deadline import Deadline

HEADER = CallHeader(0, 3, -1, Kind.SEND, dtype_code(np.dtype(np.float64)), 0)
PAYLOAD = np.arange(3.0).view(np.uint8).data
_CODE = {
    module.__file__
    for module in (
        interrupts,
        future,
        incoming,
        frame_queue,
        call_stream,
        mailboxes,
        threading,
        work,
    )
}


def at_every_step(wait: Callable[[], object], check: Callable[[], object]) -> int:
    return interruptions.at_every_step(wait, check, _CODE)


def call(seconds: float) -> Call:
    return Call(HEADER, Deadline.after(seconds))


def new_mailbox() -> Mailbox:
    return Mailbox(Membership("g", 0, (0, 1), HashStore(), Runtime(secret=b"s")))


class TestMailbox:
    def test_receiving_in_vain(self) -> None:
        """Another thread's messages go through after it, one that waits for them included."""
        mailbox = new_mailbox()

        def wait() -> None:
            with suppress(CommunicatorTimeoutError):
                mailbox.recv(call(0), np.zeros(3), 1, 0)

        def check() -> None:
            mailbox.deliver(1, HEADER, PAYLOAD)
            got = np.zeros(3)
            assert mailbox.recv(call(SOON), got, 1, 0) == 1
            assert got.tolist() == [0.0, 1.0, 2.0]
            assert not mailbox._receives

        assert at_every_step(wait, check) > 100

    def test_delivering(self) -> None:
        mailbox = new_mailbox()

        def check() -> None:
            mailbox.left_over()

        assert at_every_step(lambda: mailbox.deliver(1, HEADER, PAYLOAD), check) > 50


class TestInproc:
    def test_waiting_for_a_frame(self) -> None:
        self._at_every_step(lambda channel: channel.begin_take(Deadline.after(0)))

    def test_waiting_until_a_frame_is_taken(self) -> None:
        def wait(channel: FrameQueue) -> None:
            channel.wait_taken(channel.offer(call(SOON), PAYLOAD), Deadline.after(0))

        self._at_every_step(wait)

    def _at_every_step(self, wait: Callable[[FrameQueue], object]) -> None:
        channels = [FrameQueue(0)]

        def check() -> None:
            channels[-1].offer(call(SOON), PAYLOAD)
            assert channels[-1].begin_take(Deadline.after(0))
            channels.append(FrameQueue(0))

        assert at_every_step(lambda: wait(channels[-1]), check) > 50


class TestCalls:
    def test_waiting_for_a_future(self) -> None:
        futures = [future.Future()]

        def wait() -> None:
            with suppress(future.WaitTimeoutError):
                futures[-1].wait(0.0001)

        def check() -> None:
            futures[-1]._settle(1, None)
            assert futures[-1].wait(SOON) == 1
            futures.append(future.Future())

        assert at_every_step(wait, check) > 50

    def test_draining_a_lane(self) -> None:
        stream = CallStream("stream")
        assert stream.try_enter()

        def check() -> None:
            stream.submit(lambda: None)
            assert not stream.drain(0)
            stream._queue.clear()

        assert at_every_step(lambda: stream.drain(0.0001), check) > 50
        stream.leave()
        stream.join(SOON)
