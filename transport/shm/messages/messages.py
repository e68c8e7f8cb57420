"""Point-to-point messages through rings in the receivers' memory.

A sender copies into its ring at the receiver; whoever waits for a message there takes everything
out of all rings, for every thread of its rank (one of them at a time is the *carrier*). A message
that nobody waits for stays in the ring. Once that is full, the sender asks the receiver's endpoint
to carry, so that messages are taken in up to the mailbox's limit whatever the receiving rank does.

A carrier that finds nothing sleeps on its inbox's *bell*, a word into which each sender writes some
value that was never there before.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from transport.call import NO_ROOT, Call, CallHeader, Kind, dtype_code
from transport.communicators.runtime import Membership
from transport.condition import has, hold, let_go
from transport.errors import CommunicatorTimeoutError, DistBackendError, PeerLostError
from transport.links.incoming import Incoming, Receive
from transport.links.mailbox import Mailbox
from transport.native import core
from transport.operands.copying import address
from transport.operands.flat import as_bytes
from transport.operands.reduce_op import Flat
from transport.shm.board.futex import Fence
from transport.shm.board.layout import Sizes, lines, pages
from transport.shm.board.patience import Patience
from transport.shm.board.segment import LINE, OwnedSegment, Segment
from transport.shm.meeting.directory import Directory
from transport.shm.meeting.neighbourhood import Neighbourhood
from transport.shm.messages.ring import ASLEEP, BELL, CONTROL_LINES, RingReader, RingWriter
from transport.shm.messages.single_copy import PeerMemory

_MOST_RINGS = 4 << 20
# Two processors that copy through a ring at the same time, in the core's small pieces, are sooner
# done up to here than the kernel is with its one copy.
_TWO_COPIES = 32 << 20
_LOW_HALF = 2**32 - 1
_CAPACITY = 1  # a word of an inbox, as BELL and ASLEEP
INBOX = "inbox"


class InboxLayout:
    """Offsets in a member's inbox: a line with the bell, one with the owner's sleeping flag, and a
    ring of ``capacity`` bytes for every member.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self.capacity = capacity
        self._rings = pages(LINE * (2 + CONTROL_LINES * size))
        self.nbytes = self._rings + size * capacity

    @classmethod
    def choose(cls, size: int, sizes: Sizes) -> InboxLayout:
        """Return the layout for ``size`` members, of bounded memory."""
        most = max(64 << 10, min(1 << 20, _MOST_RINGS // max(1, size - 1)))
        return cls(size, lines(sizes.ring or most))

    def ring(self, rank: int) -> tuple[int, int, int]:
        """Return where the control lines and the bytes of ``rank``'s ring are, and its capacity."""
        control = LINE * (2 + CONTROL_LINES * rank)
        return control, self._rings + rank * self.capacity, self.capacity


class Outbox:
    """This rank's ring at another member. Senders take turns by ``turn``."""

    def __init__(self, inbox: Segment, member: tuple[int, int], piece: int, may_spin: bool) -> None:
        rank, size = member
        layout = InboxLayout(size, inbox.words[_CAPACITY])
        if layout.nbytes > inbox.nbytes:
            raise DistBackendError(f"expected an inbox of {layout.nbytes} bytes")
        self.turn = threading.RLock()
        self.ring = RingWriter(inbox, layout.ring(rank), piece, member, may_spin)


class Messages(Mailbox):
    """The mailbox of one member, with the rings that lead to it and from it.

    ``shared``: another transport delivers messages of other members here. ``memory``: how other
    members' memory is read, once all have found out that they can.
    """

    def __init__(
        self,
        membership: Membership,
        directory: Directory,
        neighbourhood: Neighbourhood,
        kick: Callable[[int], None],
        patience: Patience,
        sizes: Sizes,
    ) -> None:
        super().__init__(membership)
        size, rank = membership.size, membership.rank
        layout = InboxLayout.choose(size, sizes)
        self.inbox = OwnedSegment(layout.nbytes, "inbox")
        self.inbox.words[_CAPACITY] = layout.capacity
        self.shared = False
        self.memory: PeerMemory | None = None
        self._directory = directory
        self._neighbourhood = neighbourhood
        self._kick = kick
        self._patience = patience
        self._piece = sizes.piece
        self._least_offered = 0 if core is None or patience.crowded else _TWO_COPIES
        self._rank, self._size = rank, size
        self._rings = {
            src: RingReader(
                self.inbox, layout.ring(src), sizes.piece, (rank, size), not patience.crowded, src
            )
            for src in range(size)
            if src != rank
        }
        # The carrier's: whoever holds the lock.
        self._carrying = threading.RLock()
        self._carrier: int | None = None
        self._fence = Fence()
        # Members that are gone, until all that they sent is taken.
        self._ending: dict[int, PeerLostError] = {}
        self._gone: dict[int, PeerLostError] = {}
        self._watched: set[int] = set()
        self._outboxes: dict[int, Outbox] = {}
        self._guard = threading.Lock()
        self._own_rings = itertools.count(1)

    # Sending.

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        """Send a message to another member; return when ``data`` may be reused."""
        outbox = self._outboxes.get(dst) or self._open_outbox(dst, call)
        turn = outbox.turn
        try:
            if not turn.acquire(False):
                call.waiting_for = dst
                if not turn.acquire(timeout=call.deadline.remaining()):
                    raise self._unsent(call, dst)
                call.waiting_for = None
            self._write(call, data, dst, outbox)
            turn.release()
        except BaseException:
            let_go(turn)
            raise

    def has_room(self, dst: int, nbytes: int) -> bool:
        """Whether a message fits into this rank's ring at ``dst`` as it is now."""
        outbox = self._outboxes.get(dst)
        if outbox is None or dst in self._gone:
            return False
        if nbytes >= self._least_offered and self._pays(nbytes):
            return False  # it is offered, and waits to be taken
        ring = outbox.ring
        needed = ring.position + LINE + lines(nbytes) - ring.capacity
        return not ring.broken and needed <= ring.words[ring.taken]

    def _write(self, call: Call, data: memoryview, dst: int, outbox: Outbox) -> None:
        ring, size = outbox.ring, data.nbytes
        if dst in self._gone or ring.broken:
            self._check_receiver(call, dst, outbox)
        if size >= self._least_offered and self._pays(size):
            self._offer(call, data, dst, outbox)
            return
        patient = call.sync and self._patience.polls
        piece = ring.piece
        while not ring.begin(call.packed, data, patient):
            self._await_room(call, dst, outbox, LINE + min(lines(size), piece))
        try:
            while True:
                if not ring.left:
                    break
                self._await_room(call, dst, outbox, lines(min(ring.left, piece)))
                ring.go_on(data, patient)
        except BaseException:
            ring.give_up()
            raise

    def _pays(self, nbytes: int) -> bool:
        return self.memory is not None and self.memory.pays(nbytes, alone=True)

    def _offer(self, call: Call, data: memoryview, dst: int, outbox: Outbox) -> None:
        """Say where a message is, and wait until the receiver has taken it from there."""
        ring, size = outbox.ring, data.nbytes
        self._await_room(call, dst, outbox, LINE)
        ring.offer(call.packed, size, address(np.frombuffer(data, np.uint8)))
        try:
            self._await_room(call, dst, outbox, ring.capacity)
        except BaseException:
            ring.give_up()
            raise

    def _await_room(self, call: Call, dst: int, outbox: Outbox, nbytes: int) -> None:
        ring = outbox.ring
        least = ring.position + nbytes - ring.capacity
        if least <= ring.words[ring.taken]:
            return
        call.waiting_for = dst

        def check() -> None:
            self._check_receiver(call, dst, outbox)
            self._kick(dst)

        self._patience.wait(
            call,
            lambda: ring.words[ring.taken] >= least,
            ring.segment,
            ring.taken,
            ring.set_sleeping,
            check,
        )
        call.waiting_for = None

    def _check_receiver(self, call: Call, dst: int, outbox: Outbox) -> None:
        """Raise when there is no sense in sending, or in waiting until one can."""
        name = self._membership.describe(dst)
        self._directory.check()
        if dst in self._gone:
            raise PeerLostError(str(self._gone[dst]), dst)
        if outbox.ring.broken:
            raise PeerLostError(f"an earlier message to {name} was broken off in the middle", dst)
        if call.deadline.expired:
            raise self._unsent(call, dst)

    def _unsent(self, call: Call, dst: int) -> CommunicatorTimeoutError:
        name = self._membership.describe(dst)
        return CommunicatorTimeoutError(
            f"send to {name} passed its deadline of {call.deadline.seconds:g} s: its inbox is full,"
            " and nobody receives",
            dst,
        )

    def _open_outbox(self, dst: int, call: Call) -> Outbox:
        self._directory.check()
        if dst in self._gone:
            raise PeerLostError(str(self._gone[dst]), dst)
        inbox = self._neighbourhood.fetch(dst, INBOX, call)
        with self._guard:
            self._watched.add(dst)
            outbox = self._outboxes.get(dst)
            if outbox is None:
                outbox = self._outboxes[dst] = Outbox(
                    inbox, (self._rank, self._size), self._piece, not self._patience.crowded
                )
            return outbox

    # Receiving.

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        """See ``Mailbox.recv``."""
        if len(self._watched) < self._size - 1:
            self._watch(call, src)
        if core is not None and call.sync and src is not None and self._patience.polls:
            ring = self._rings.get(src)
            if ring is not None and self._meet(call, buffer, ring, tag):
                return src
        return super().recv(call, buffer, src, tag)

    def _meet(self, call: Call, buffer: Flat, ring: RingReader, tag: int) -> bool:
        """Wait a moment for the ring's next message, for the only receive that there is; return
        whether that was it. If not, nothing has happened.
        """
        src = ring.src
        receive: Receive | None = None
        try:
            with self._lock:
                if (
                    self._receives
                    or (tag, src) in self._unclaimed
                    or src in self._lost
                    or self._aborted is not None
                    or not self._try_carrying()
                ):
                    return False
            # Not before: another carrier may have begun a message until this moment.
            come = False
            if ring.between:
                call.waiting_for = src
                before, code, end = ring.position, dtype_code(buffer.dtype), cast("Any", ring)
                data = as_bytes(buffer)
                try:
                    end.meet(data, self.inbox.words[BELL], tag, code)
                finally:
                    come = ring.position != before
                    if ring.left:
                        header = CallHeader(0, buffer.size, NO_ROOT, Kind.SEND, code, 0, extra=tag)
                        incoming = Incoming(self._lock, self._stir, src, header, data)
                        receive = Receive(call, buffer, src, tag)
                        receive.incoming = incoming
                        ring.adopt(incoming)
            self._stop_carrying()
            if receive is not None:
                self._await_rest(call, receive)
            if come:
                call.waiting_for = None
            return come
        except BaseException:
            self._drop_carrying()
            let_go(self._lock)
            if receive is not None:
                with self._lock:
                    self._give_up(receive)
            raise

    def carry(self) -> None:
        """Take in what has arrived. Never blocks; any thread."""
        try:
            if not self._try_carrying():
                self._ring_bell()
                return
            while True:
                if not self._carry(False):
                    break
            self._stop_carrying()
        except BaseException:
            self._drop_carrying()
            raise

    def lose(self, src: int, error: PeerLostError) -> None:
        """Be told that member ``src`` is gone; what it sent before is still received."""
        with self._guard:
            self._gone.setdefault(src, error)
            self._ending.setdefault(src, error)
            outbox = self._outboxes.get(src)
        self.carry()
        if outbox is not None:
            outbox.ring.segment.futex.wake(outbox.ring.taken)

    def abort(self, reason: str) -> None:
        """See ``Mailbox.abort``; senders are woken as well."""
        super().abort(reason)
        self._ring_bell()
        # An interrupted call, which is the reason, may have kept them.
        self._drop_carrying()
        with self._guard:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            let_go(outbox.turn)
            outbox.ring.segment.futex.wake(outbox.ring.taken)

    def _watch(self, call: Call, src: int | None) -> None:
        """See to it that this rank learns when a member goes from which it waits for a message."""
        for peer in self._rings if src is None else (src,):
            if peer == self._rank or peer in self._watched:
                continue
            # A member that has not said where it is has not sent anything either.
            if src is None and not self._directory.is_known(peer):
                continue
            # Another transport that delivers here watches those whom this one cannot reach.
            if not self.shared or self._directory.is_near(peer, call):
                self._neighbourhood.watch(peer, call)
            self._watched.add(peer)

    def _stir(self) -> None:
        # A thread that waits may be the carrier, which sleeps on the bell.
        if self._carrier not in {None, threading.get_ident()}:
            self._ring_bell()

    def _sleep(self, call: Call, receive: Receive) -> None:
        """Carry messages until something has arrived, or wait for the thread that does."""
        rung = self.inbox.words[BELL]
        try:
            if not self._try_carrying():
                if any(ring.stalled for ring in self._rings.values()):
                    self._ring_bell()  # this receive may be what the ring waits for
                super()._sleep(call, receive)
                return
            try:
                self._lock.release()
                self._carry_patiently(call, rung)
                self._stop_carrying()
            finally:
                hold(self._lock)
        except BaseException:
            self._drop_carrying()
            hold(self._lock)
            raise
        self._check_aborted()
        if call.deadline.expired:
            raise self._late(call, receive)

    def _try_carrying(self) -> bool:
        """Become the carrier, unless there is one."""
        me = threading.get_ident()
        if self._carrier == me or not self._carrying.acquire(blocking=False):
            return False
        self._carrier = me
        return True

    def _stop_carrying(self) -> None:
        """Leave the rest to somebody else. Not under the mailbox's lock."""
        while True:
            self._carrier = None
            self._carrying.release()
            self._wake_carriers()
            if not self._ending or not self._try_carrying():
                return
            # Somebody came with news while this thread was busy.
            self._carry(False)

    def _drop_carrying(self) -> None:
        """Leave all to somebody else if this thread carries, wherever an exception came."""
        if has(self._carrying):
            self._carrier = None
            let_go(self._carrying)
            self._wake_carriers()

    def _wake_carriers(self) -> None:
        """Let another thread carry: who came meanwhile sleeps, and has to look."""
        with self._lock:
            for wake in self._asleep:
                wake.notify_all()

    def _carry_patiently(self, call: Call, rung: int) -> None:
        patient = call.sync and self._patience.polls
        if self._carry(patient):
            return

        def news() -> bool:
            return words[BELL] != rung or any(ring.pending() or ring.breaks for ring in rings)

        words = self.inbox.words
        rings = tuple(ring for ring in self._rings.values() if ring.listens)
        if core is None or not rings:
            heard = self._patience.poll(call, news)
        else:
            heard = patient and core.RingEnd.listen(rings, rung)
        if not heard:
            self._patience.sleep(
                call,
                lambda: call.deadline.expired or news(),
                self.inbox,
                BELL,
                self._set_asleep,
                lambda: None,
            )
            if not news():
                return
        self._carry(patient)

    def _set_asleep(self, asleep: bool) -> None:
        self.inbox.words[ASLEEP] = asleep
        if asleep:
            self._fence()

    def _carry(self, patient: bool) -> bool:
        """Move up to a message from each ring; return whether anything was there.

        ``patient``: who is in the middle of one is given a moment to go on.
        """
        moved = False
        for src, ring in self._rings.items():
            if ring.pull(self, self.memory, patient):
                moved = True
            elif ring.breaks and src not in self._gone:
                ring.given_up = True
                name = self._membership.describe(src)
                error = PeerLostError(f"{name} broke off a message in the middle", src)
                self._ending.setdefault(src, error)
        if self._ending:
            for src, error in list(self._ending.items()):
                if self._rings[src].end(error):
                    del self._ending[src]
                    self.fail(src, error)
                    moved = True
        return moved

    def _ring_bell(self) -> None:
        """Have the carrier of this rank look again."""
        value = next(self._own_rings) * self._size + self._rank
        self.inbox.words[BELL] = value & _LOW_HALF
        self.inbox.futex.wake(BELL)
