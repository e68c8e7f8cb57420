"""The only receive that there is takes its message out of the ring itself: what comes between."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group
from transport._errors import CommunicatorAbortedError, PeerLostError
from transport._shm import ShmCommunicator
from transport._shm.messages import Messages
from transport._shm.sizes import Sizes
from transport._shm.support import the_core

SMALL = Sizes(block=1 << 10, direct=64, ring=1 << 10)
SHM = Transport("shm", lambda membership, _: ShmCommunicator(membership, SMALL), has_links=False)
LARGE = np.arange(4096).astype(np.uint8)


def begin(member: Member) -> Any:
    """Pass the first message, from rank 0 to rank 1; return the mailbox."""
    if member.rank == 0:
        member.send(np.ones(1), 1)
    else:
        member.recv(np.ones(1), 0)
    return member.comm.mailbox  # type: ignore[attr-defined]


def write_a_part(member: Member, stopped: threading.Barrier, tag: int) -> None:
    """Send ``LARGE``, of which the ring has room for a part, and stop there twice."""
    mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]

    def look_up(*args: Any) -> None:
        del mailbox._look_up
        stopped.wait()
        stopped.wait()
        Messages._look_up(mailbox, *args)

    mailbox._look_up = look_up
    member.send(LARGE, 1, tag=tag)


def test_a_message_that_another_thread_has_just_begun_is_not_taken_over() -> None:
    stopped = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        mailbox = begin(member)
        if member.rank == 0:
            write_a_part(member, stopped, tag=1)
            member.send(LARGE[::-1].copy(), 1, tag=2)
            return

        def try_carrying() -> bool:
            del mailbox._try_carrying
            mailbox._rings[0].pull(mailbox, the_core().LOOK)  # as a carrier that has gone since
            stopped.wait()  # the rest comes
            return mailbox._try_carrying()

        stopped.wait()
        mailbox._try_carrying = try_carrying
        second, first = np.zeros_like(LARGE), np.zeros_like(LARGE)
        member.recv(second, 0, tag=2)
        member.recv(first, 0, tag=1)
        assert np.array_equal(first, LARGE)
        assert np.array_equal(second, LARGE[::-1])

    run_group(SHM, 2, body)


def test_an_abort_in_the_middle_of_a_message_ends_its_receive() -> None:
    stopped = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        mailbox = begin(member)
        if member.rank == 0:
            with suppress(PeerLostError):  # the other end takes the rest, or is gone
                write_a_part(member, stopped, tag=1)
            return

        def stop_carrying() -> None:
            del mailbox._stop_carrying
            mailbox._stop_carrying()
            member.comm.abort("by the test")

        stopped.wait()
        mailbox._stop_carrying = stop_carrying
        got = np.zeros_like(LARGE)
        with pytest.raises(CommunicatorAbortedError, match="by the test"):
            member.recv(got, 0, tag=1)
        taken = got.copy()
        stopped.wait()
        mailbox.carry()
        assert np.array_equal(got, taken)

    run_group(SHM, 2, body)


def test_an_interrupt_in_the_middle_of_a_message_takes_the_buffer_back() -> None:
    stopped = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        mailbox = begin(member)
        if member.rank == 0:
            write_a_part(member, stopped, tag=1)
            return

        def stop_carrying() -> None:
            del mailbox._stop_carrying
            raise KeyboardInterrupt

        stopped.wait()
        mailbox._stop_carrying = stop_carrying
        got = np.zeros_like(LARGE)
        with pytest.raises(KeyboardInterrupt):
            member.recv(got, 0, tag=1)
        taken = got.copy()
        assert np.array_equal(taken[:256], LARGE[:256])
        stopped.wait()
        while mailbox._rings[0]._incoming is not None:
            mailbox.carry()
        assert np.array_equal(got, taken)

    run_group(SHM, 2, body)


def test_what_is_left_of_a_lost_member_waits_for_room_and_keeps_no_thread_busy() -> None:
    sent = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        mailbox = begin(member)
        if member.rank == 0:
            for _ in range(2):
                member.send(LARGE[:100], 1, tag=1)
            sent.wait()
            return
        mailbox._limit = 1
        sent.wait()
        lose = threading.Thread(target=mailbox.lose, args=(0, PeerLostError("it is gone", 0)))
        lose.start()
        lose.join(LONG)
        assert not lose.is_alive()
        for _ in range(2):
            got = np.zeros_like(LARGE[:100])
            member.recv(got, 0, tag=1)
            assert np.array_equal(got, LARGE[:100])
        with pytest.raises(PeerLostError, match=r"gone|closed"):
            member.recv(np.zeros(1), 0, tag=1)

    run_group(SHM, 2, body)
