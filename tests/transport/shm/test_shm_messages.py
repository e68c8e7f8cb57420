"""Messages through rings: sizes around their pieces and ends, and who is late."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from rank_threads import LONG, Member, Transport, run_group

from transport.call import NO_ROOT, CallHeader, Kind
from transport.errors import CommunicatorTimeoutError, PeerLostError
from transport.native import core
from transport.shm import ShmCommunicator
from transport.shm.board.layout import Sizes
from transport.shm.board.segment import LINE, OwnedSegment
from transport.shm.messages import messages as shm_messages
from transport.shm.messages import ring as rings

SMALL = Sizes(block=1 << 10, direct=64, ring=1 << 10, piece=256)
SHM = Transport("shm", lambda membership, _: ShmCommunicator(membership, SMALL), has_links=False)
AROUND = [
    size + more
    for size in (0, LINE, 256, 512, 1024 - LINE, 1024, 1280, 4096)
    for more in (-1, 0, 1)
    if size + more >= 0
]
PACKED = bytes(range(32))
KINDS = [pytest.param(rings._RingEnd, id="python")] + (
    [] if core is None else [pytest.param(core.RingEnd, id="core")]
)


def ends(
    writer: Any, reader: Any, capacity: int = 1024, piece: int = 256
) -> tuple[OwnedSegment, Any, Any]:
    segment = OwnedSegment(4096 + capacity, "test")
    where = (2 * LINE, 4096, capacity, piece, rings.BELL, rings.ASLEEP)
    return segment, writer(segment, *where, 1, 2, True), reader(segment, *where, 0, 2, True)


@pytest.mark.parametrize("writer", KINDS)
@pytest.mark.parametrize("reader", KINDS)
def test_a_ring_has_the_same_bytes_whoever_writes_and_reads(writer: Any, reader: Any) -> None:
    segment, sender, receiver = ends(writer, reader)
    rng = np.random.default_rng(7)
    for size in AROUND:
        data = rng.integers(0, 256, size, np.uint8)
        into = np.full(size + 2, 99, np.uint8)
        where = memoryview(into)[1 : size + 1]
        assert sender.begin(PACKED, memoryview(data), False), size
        at = 4096 + receiver.position % 1024
        head = bytes(segment.data[at : at + LINE])
        assert head == PACKED + size.to_bytes(8, "little") + bytes(LINE - 40)
        receiver.position += LINE
        receiver.left = size
        for _ in range(40):
            receiver.take(where, False)
            sender.go_on(memoryview(data), False)
        assert (sender.left, receiver.left) == (0, 0)
        assert sender.position == receiver.position
        assert np.array_equal(into[1:-1], data)
        assert into[0] == into[-1] == 99  # and not a byte beside it


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_is_not_begun_without_room_for_its_first_piece(kind: Any) -> None:
    segment, sender, receiver = ends(kind, kind)
    data = memoryview(bytes(1000))
    assert sender.begin(PACKED, data, False)
    written = segment.words[2 * LINE // 8]
    assert sender.left == 1000 - 3 * 256
    receiver.position, receiver.left = LINE, 1000
    while receiver.left > 1000 - 3 * 256:
        receiver.take(memoryview(bytearray(1000)), False)
    sender.go_on(data, False)
    assert sender.left == 0
    for _ in range(2):
        assert sender.begin(PACKED, memoryview(bytes(200)), False)
    assert not sender.begin(PACKED, data, True)  # after a look for some time
    assert segment.words[2 * LINE // 8] == sender.position > written


@pytest.mark.skipif(core is None, reason="there is no compiled core")
def test_the_core_refuses_what_does_not_fit() -> None:
    assert core is not None
    _, sender, receiver = ends(core.RingEnd, core.RingEnd)
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        sender.begin(b"abc", memoryview(b""), False)
    receiver.left = 10
    with pytest.raises(ValueError, match="10 bytes are to come, of 3"):
        receiver.take(memoryview(bytearray(3)), False)
    with pytest.raises((TypeError, BufferError)):
        receiver.take(memoryview(bytes(10)), False)
    segment = OwnedSegment(4096, "test")
    with pytest.raises(ValueError, match="not within"):
        core.RingEnd(segment, 128, 4096, 1024, 256, 0, 8, 0, 2, True)
    with pytest.raises(TypeError, match="RingEnds"):
        core.RingEnd.listen((1,), 0)
    assert core.RingEnd.listen((), 0) is False


@pytest.mark.skipif(core is None, reason="there is no compiled core")
def test_the_core_takes_the_message_that_is_waited_for_and_no_other() -> None:
    assert core is not None
    segment, sender, receiver = ends(core.RingEnd, core.RingEnd)
    header = CallHeader(5, 300, NO_ROOT, Kind.SEND, 3, 0, extra=2**32 - 1)
    data = np.arange(300).astype(np.uint8)
    into = np.zeros(300, np.uint8)
    receiver.meet(into.data, 0, 7, 3)  # nothing comes
    assert sender.begin(header.pack(), data.data, False)
    for size, tag, dtype in ((299, 2**32 - 1, 3), (300, 7, 3), (300, 2**32 - 1, 4)):
        receiver.meet(into[:size].data, 0, tag, dtype)
        assert (receiver.position, receiver.left) == (0, 0)
        assert not into.any()
    receiver.meet(into.data, 0, 2**32 - 1, 3)
    assert (receiver.position, receiver.left) == (sender.position, 0)
    assert np.array_equal(into, data)
    assert segment.words[3 * LINE // 8] == sender.position
    # One that is in the middle is left to those who began it.
    assert sender.begin(header.pack(), data.data, False)
    receiver.left = 4
    receiver.meet(into.data, 0, 2**32 - 1, 3)
    assert receiver.position < sender.position


@pytest.mark.skipif(core is None, reason="there is no compiled core")
def test_what_is_written_past_the_caches_is_the_same() -> None:
    """Enough for every way of writing to have been tried several times."""
    assert core is not None
    _, sender, receiver = ends(core.RingEnd, core.RingEnd, 64 << 10, 32 << 10)
    rng = np.random.default_rng(3)
    for size in (300_001, 64 << 10, 1_000_063):
        for _ in range(4):
            data = rng.integers(0, 256, size, np.uint8)
            into = np.zeros(size, np.uint8)
            assert sender.begin(PACKED, memoryview(data), False)
            receiver.position += LINE
            receiver.left = size
            while receiver.left:
                receiver.take(memoryview(into), False)
                sender.go_on(memoryview(data), False)
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


def test_who_stops_in_the_middle_is_named_and_what_came_before_is_received(
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

            monkeypatch.setattr(shm_messages.Messages, "_await_room", interrupt)
            with pytest.raises(Interrupted):
                member.send(second, 1)
            gate.wait()
            with pytest.raises(PeerLostError, match="broken off"):
                member.send(first, 1)
            gate.wait()
        else:
            gate.wait()
            got = np.zeros_like(first)
            member.recv(got, 0)
            assert np.array_equal(got, first)
            with pytest.raises(PeerLostError, match="rank 0 broke off"):
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
            mailbox._writers[1].give_up()
            gate.wait()
            gate.wait()
            return

        def carry(patient: bool) -> bool:
            moved = type(mailbox)._carry(mailbox, patient)
            if not moved and mailbox._carry is carry:
                del mailbox._carry
                gate.wait()  # it was whole when this one looked
                gate.wait()
            return moved

        gate.wait()
        member.recv(np.ones(1), 0)
        mailbox._carry = carry
        with pytest.raises(PeerLostError, match="rank 0 broke off"):
            member.recv(np.ones(1), 0, timeout=LONG)
        gate.wait()

    run_group(SHM, 2, body)
