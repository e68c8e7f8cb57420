"""Messages through rings: sizes around their pieces and ends, and who is late."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.transport.rank_threads import LONG, Member, Transport, run_group
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._errors import CommunicatorTimeoutError, PeerLostError
from transport._shm import ShmCommunicator
from transport._shm.messages import Messages
from transport._shm.segment import OwnedSegment
from transport._shm.sizes import Sizes
from transport._shm.support import the_core

LINE = 64
SMALL = Sizes(block=1 << 10, direct=64, ring=1 << 10)
SHM = Transport("shm", lambda membership, _: ShmCommunicator(membership, SMALL), has_links=False)
AROUND = [
    size + more
    for size in (0, LINE, 256, 512, 1024 - LINE, 1024, 1280, 4096)
    for more in (-1, 0, 1)
    if size + more >= 0
]


def packed(size: int) -> bytes:
    return CallHeader(5, size, NO_ROOT, Kind.SEND, 3, 0, extra=2**32 - 1).pack()


def ends(capacity: int = 1024) -> tuple[OwnedSegment, Any, Any]:
    """The two ends of the ring from member 1 in the inbox of member 0."""
    core = the_core()
    nbytes, _ = core.measure_inbox(2, capacity)
    segment = OwnedSegment(nbytes, "test")
    core.create_inbox(segment.mapping, 2, capacity)
    return segment, *(core.RingEnd(segment.mapping, 2, 1, member, True) for member in (1, 0))


def accept(receiver: Any) -> int:
    """Begin to take the next message; return its size."""
    _, size = receiver.peek()
    receiver.accept(size)
    return size


def test_messages_of_all_sizes_arrive_and_nothing_beside_them() -> None:
    core = the_core()
    _, sender, receiver = ends()
    rng = np.random.default_rng(7)
    for size in AROUND:
        data = rng.integers(0, 256, size, np.uint8)
        into = np.full(size + 2, 99, np.uint8)
        where = memoryview(into)[1 : size + 1]
        assert sender.begin(packed(size), memoryview(data), core.LOOK) in (core.DONE, core.AGAIN)
        assert receiver.peek() == (packed(size), size)
        assert accept(receiver) == size
        while receiver.left or sender.left:
            receiver.take(where, core.LOOK)
            sender.write(memoryview(data), core.LOOK)
        assert sender.position == receiver.position
        assert np.array_equal(into[1:-1], data)
        assert into[0] == into[-1] == 99


def test_a_message_is_not_begun_without_room_for_its_first_piece() -> None:
    core = the_core()
    _, sender, receiver = ends()
    data = memoryview(bytes(1000))
    assert sender.begin(packed(1000), data, core.LOOK) == core.AGAIN
    assert sender.left == 1000 - 3 * 256
    accept(receiver)
    while receiver.left > 1000 - 3 * 256:
        receiver.take(memoryview(bytearray(1000)), core.LOOK)
    assert sender.write(data, core.LOOK) == core.DONE
    assert sender.has_room(200)
    for _ in range(2):
        assert sender.begin(packed(200), memoryview(bytes(200)), core.LOOK) == core.DONE
    assert not sender.has_room(1000)
    before = sender.position
    for mode in (core.LOOK, core.SPIN, core.SLEEP, core.NAP):
        assert sender.begin(packed(1000), data, mode) == core.AGAIN
        assert (sender.position, sender.left) == (before, 0)


def test_what_does_not_fit_is_refused() -> None:
    core = the_core()
    segment, sender, receiver = ends()
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        sender.begin(b"abc", memoryview(b""), core.LOOK)
    sender.begin(packed(10), memoryview(bytes(10)), core.LOOK)
    accept(receiver)
    with pytest.raises(ValueError, match="10 bytes are left, but the buffer has 3"):
        receiver.take(memoryview(bytearray(3)), core.LOOK)
    with pytest.raises((TypeError, BufferError)):
        receiver.take(memoryview(bytes(10)), core.LOOK)
    with pytest.raises(ValueError, match="not an inbox of 3 members"):
        core.RingEnd(segment.mapping, 3, 1, 0, True)
    with pytest.raises(ValueError, match="not an inbox"):
        core.RingEnd(bytearray(4096), 2, 1, 0, True)
    with pytest.raises(TypeError, match="RingEnds"):
        core.await_inbox(segment.mapping, (1,), 0, core.LOOK)
    assert core.await_inbox(segment.mapping, (), 0, core.LOOK) is False


def test_the_message_that_is_waited_for_is_taken_and_no_other() -> None:
    core = the_core()
    _, sender, receiver = ends()
    header = packed(300)
    data = np.arange(300).astype(np.uint8)
    into = np.zeros(300, np.uint8)
    receiver.meet(into.data, 0, 7, 3)  # nothing comes
    assert sender.begin(header, data.data, core.LOOK) == core.DONE
    for size, tag, dtype in ((299, 2**32 - 1, 3), (300, 7, 3), (300, 2**32 - 1, 4)):
        receiver.meet(into[:size].data, 0, tag, dtype)
        assert (receiver.position, receiver.left) == (0, 0)
        assert not into.any()
    receiver.meet(into.data, 0, 2**32 - 1, 3)
    assert (receiver.position, receiver.left) == (sender.position, 0)
    assert np.array_equal(into, data)
    # One that is in the middle is left to those who began it.
    assert sender.begin(header, data.data, core.LOOK) == core.DONE
    accept(receiver)
    receiver.meet(into.data, 0, 2**32 - 1, 3)
    assert receiver.left == 300


def test_what_is_written_past_the_caches_is_the_same() -> None:
    """Enough for every way of writing to have been tried several times."""
    core = the_core()
    _, sender, receiver = ends(128 << 10)
    rng = np.random.default_rng(3)
    for size in (300_001, 64 << 10, 1_000_063):
        for _ in range(4):
            data = rng.integers(0, 256, size, np.uint8)
            into = np.zeros(size, np.uint8)
            sender.begin(packed(size), memoryview(data), core.LOOK)
            accept(receiver)
            while receiver.left:
                receiver.take(memoryview(into), core.LOOK)
                sender.write(memoryview(data), core.LOOK)
            assert np.array_equal(into, data)


@pytest.mark.parametrize("late", ["nobody", "receiver", "sender"])
def test_sizes_around_pieces_and_ends_whoever_is_late(late: str) -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        for size in AROUND if late == "nobody" else (1, 256, 1024, 4097):
            x = ((np.arange(size) * 7 + size) % 251).astype(np.uint8)
            gate.wait()
            if late == ("sender", "receiver")[member.rank]:
                time.sleep(0.01)
            if member.rank == 0:
                member.send(x, 1)
            else:
                got = np.zeros(size, np.uint8)
                assert member.recv(got, 0) == 0
                assert np.array_equal(got, x)

    run_group(SHM, 2, body)


def test_a_sender_that_stops_in_the_middle_is_named_after_its_earlier_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender is interrupted while it waits for room."""
    gate = threading.Barrier(2, timeout=LONG)

    class Interrupted(BaseException):
        pass

    def body(member: Member) -> None:
        first, second = np.arange(9.0), np.ones(1 << 20)
        if member.rank == 0:
            member.send(first, 1)

            def interrupt(*_: object) -> None:
                raise Interrupted

            monkeypatch.setattr(Messages, "_look_up", interrupt)
            with pytest.raises(Interrupted):
                member.send(second, 1)
            gate.wait()
            with pytest.raises(PeerLostError, match="was interrupted"):
                member.send(first, 1)
            gate.wait()
        else:
            gate.wait()
            got = np.zeros_like(first)
            member.recv(got, 0)
            assert np.array_equal(got, first)
            with pytest.raises(PeerLostError, match="rank 0 interrupted"):
                member.recv(second, 0)
            gate.wait()

    run_group(SHM, 2, body)


def test_a_send_that_never_began_leaves_the_ring_whole() -> None:
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        stored, small = np.ones(3000, np.uint8), np.ones(700, np.uint8)
        mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]
        mailbox._limit = 3000
        if member.rank == 0:
            gate.wait()
            member.send(stored, 1)  # as much as is taken in for nobody
            member.send(small, 1)
            with pytest.raises(CommunicatorTimeoutError, match="its inbox is full"):
                member.send(small, 1, timeout=0.05)
            gate.wait()
            member.send(small, 1, tag=1)
        else:
            gate.wait()
            gate.wait()
            got = np.zeros_like(small)
            member.recv(got, 0, tag=1)
            assert got.all()

    run_group(SHM, 2, body)


def test_a_receiver_that_goes_to_sleep_as_its_sender_gives_up_learns_it() -> None:
    """Nobody rings for a receiver that does not sleep yet."""
    gate = threading.Barrier(2, timeout=LONG)

    def body(member: Member) -> None:
        mailbox: Any = member.comm.mailbox  # type: ignore[attr-defined]
        if member.rank == 0:
            member.send(np.ones(1), 1)
            gate.wait()
            gate.wait()
            mailbox._writers[1].end.give_up()
            gate.wait()
            gate.wait()
            return

        def carry(mode: int) -> bool:
            moved = type(mailbox)._carry(mailbox, mode)
            if not moved and mailbox._carry is carry:
                del mailbox._carry
                gate.wait()  # it was whole when this one looked
                gate.wait()
            return moved

        gate.wait()
        member.recv(np.ones(1), 0)
        mailbox._carry = carry
        with pytest.raises(PeerLostError, match="rank 0 interrupted"):
            member.recv(np.ones(1), 0, timeout=LONG)
        gate.wait()

    run_group(SHM, 2, body)
