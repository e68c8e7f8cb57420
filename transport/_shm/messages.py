"""Point-to-point messages through rings in the receivers' memory.

A sender copies into its ring at the receiver. One of the receiver's waiting threads is the
*carrier*: it moves messages from all rings to the mailbox, for every thread of its rank. Without a
waiting thread, messages stay in the ring. If the ring is full, the sender asks the receiver's
endpoint to carry. So the receiver accepts messages up to the mailbox's limit at any time.

A carrier without messages sleeps on its inbox's *wakeup word*, into which each sender writes a
value that the word never had.
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorTimeoutError, PeerLostError
from transport._links.incoming import IncomingMessage, PendingReceive
from transport._links.mailbox import Mailbox
from transport._operands.flat import as_bytes
from transport._operands.reduce_op import Flat
from transport._shm.meeting.directory import HostPeers
from transport._shm.rings import RingReader, RingWriter
from transport._shm.segment import OwnedSegment, no_memory
from transport._shm.sizes import Sizes
from transport._shm.support import the_core
from transport._waiting.interrupts import is_held, look, sliced

INBOX = "inbox"


class Messages(Mailbox):
    """The mailbox of one member, with its rings to and from the members on this host.

    Another transport may deliver messages of other members here.
    """

    def __init__(self, membership: Membership, host_peers: HostPeers, sizes: Sizes) -> None:
        super().__init__(membership)
        self._core: Any = the_core()
        size, rank = membership.size, membership.rank
        nbytes, capacity = self._core.measure_inbox(size, sizes.ring)
        self.inbox = OwnedSegment(nbytes, "inbox")
        self._memory = self.inbox.mapping
        try:
            self._core.create_inbox(self._memory, size, capacity)
        except OSError as error:
            raise no_memory(membership.describe(rank), nbytes, error) from error
        self._host_peers = host_peers
        self._rank, self._size = rank, size
        self._rings = {
            src: RingReader(self.inbox, (rank, size), src)
            for src in host_peers.members
            if src != rank
        }
        # Held by the carrier.
        self._carrying = threading.RLock()
        self._carriers: list[int] = []
        # Lost members, until all of their messages were carried.
        self._ending: dict[int, PeerLostError] = {}
        self._endings_changed = False
        self._gone: dict[int, PeerLostError] = {}
        self._watched: set[int] = set()
        self._writers: dict[int, RingWriter] = {}
        self._guard = threading.Lock()
        self._own_rings = itertools.count(1)
        self._senders: list[Any] = [None] * size
        self._receivers: list[Any] = [None] * size
        self.rings: tuple[Any, ...] = (
            self._senders,
            self._receivers,
            *(self._receives, self._unclaimed, self._lost, self._carriers),
        )
        """See ``Communicator.message_rings``."""

    # Sending.

    def post(self, call: Call, data: memoryview, dst: int) -> None:
        """Send a message to another member; return when ``data`` may be reused."""
        ring = self._writers.get(dst) or self._open_ring(dst, call)
        turn = ring.turn
        if not turn.acquire(False):
            call.waiting_for = dst
            if not sliced(partial(turn.acquire, True), call.deadline.remaining()):
                raise self._unsent(call, dst)
            call.waiting_for = None
        try:
            self._write(call, data, ring)
        finally:
            turn.release()

    def has_room(self, dst: int, nbytes: int) -> bool:
        """True if a message of ``nbytes`` fits into this rank's ring at ``dst`` now."""
        ring = self._writers.get(dst)
        if ring is None or dst in self._gone:
            return False
        return not ring.end.broken and ring.end.has_room(nbytes)

    def _write(self, call: Call, data: memoryview, ring: RingWriter) -> None:
        core, end = self._core, ring.end
        if ring.peer in self._gone or end.broken:
            self._check_receiver(call, ring)
        try:
            # Compiled code may have begun the message.
            begun = end.left > 0
            first = core.SPIN if call.sync else core.LOOK
            status = core.AGAIN if begun else end.begin(call.packed, data, first)
            mode = self._wait_mode(call)
            while status == core.AGAIN:
                self._look_up(call, ring)
                status = end.write(data, mode) if end.left else end.begin(call.packed, data, mode)
        finally:
            if end.left:
                end.give_up()

    def _wait_mode(self, call: Call) -> int:
        """Return the engine's mode for a call that has to wait."""
        return self._core.SLEEP if call.sync else self._core.NAP

    def _look_up(self, call: Call, ring: RingWriter) -> None:
        """Check that the receiver can still make room in a ring, and ask it to."""
        call.waiting_for = ring.peer
        self._check_receiver(call, ring)
        self._host_peers.kick(ring.peer)

    def _check_receiver(self, call: Call, ring: RingWriter) -> None:
        """Raise if the receiver is lost, the ring is broken, or the deadline has passed."""
        look()
        dst = ring.peer
        self._check_there(dst)
        if ring.end.broken:
            name = self._membership.describe(dst)
            raise PeerLostError(f"an earlier message to {name} was interrupted", dst)
        if call.deadline.expired:
            raise self._unsent(call, dst)

    def _check_there(self, dst: int) -> None:
        self._host_peers.check()
        if dst in self._gone:
            raise PeerLostError(str(self._gone[dst]), dst)

    def _unsent(self, call: Call, dst: int) -> CommunicatorTimeoutError:
        name = self._membership.describe(dst)
        return CommunicatorTimeoutError(
            f"send to {name} passed its deadline of {call.deadline.seconds:g} s: its inbox is full,"
            " and it does not receive",
            dst,
        )

    def _open_ring(self, dst: int, call: Call) -> RingWriter:
        self._check_there(dst)
        inbox = self._host_peers.fetch(dst, INBOX, call)
        with self._guard:
            self._watched.add(dst)
            ring = self._writers.get(dst)
            if ring is None:
                member = self._rank, self._size
                try:
                    ring = self._writers[dst] = RingWriter(inbox, member, dst)
                except OSError as error:
                    name = self._membership.describe(self._rank)
                    raise no_memory(name, inbox.nbytes // self._size, error) from error
            if self._aborted is None and dst not in self._gone:
                self._senders[dst], self._receivers[dst] = ring.end, self._rings[dst].end
            return ring

    # Receiving.

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        """See ``Mailbox.recv``."""
        if len(self._watched) < len(self._rings):
            self._watch(call, src)
        if call.sync and src is not None:
            ring = self._rings.get(src)
            if ring is not None and self._meet(call, buffer, ring, tag):
                return src
        return super().recv(call, buffer, src, tag)

    def _meet(self, call: Call, buffer: Flat, ring: RingReader, tag: int) -> bool:
        """Try to receive the ring's next message directly into ``buffer``, without the mailbox.

        If this is the only receive, wait a moment for the message. A message that compiled code
        began in this buffer is completed. Return whether a message was received; otherwise, the
        call had no effect.
        """
        src = ring.peer
        receive: PendingReceive | None = None
        end, code, data = ring.end, dtype_code(buffer.dtype), as_bytes(buffer)
        begun = received = end.has_begun(data)
        with self._lock:
            if not begun and (
                self._receives
                or (tag, src) in self._unclaimed
                or src in self._lost
                or self._aborted is not None
                or not self._try_carrying()
            ):
                return False
        try:
            # Checked only now: until this thread was the carrier, another one may have begun a
            # message.
            if begun or ring.between:
                call.waiting_for = src
                before = end.position
                try:
                    if not begun:
                        end.meet(data, self._core.read_wakeup(self._memory), tag, code)
                finally:
                    received = received or end.position != before
                    if end.left:
                        header = CallHeader(0, buffer.size, NO_ROOT, Kind.SEND, code, 0, extra=tag)
                        incoming = IncomingMessage(self._lock, self._on_change, src, header, data)
                        receive = PendingReceive(call, buffer, src, tag, code)
                        receive.incoming = incoming
                        ring.adopt(incoming)
            if not begun:
                self._stop_carrying()
            if receive is not None:
                self._await_rest(call, receive)
            if received:
                call.waiting_for = None
            return received
        finally:
            self._drop_carrying()
            if receive is not None:
                with self._lock:
                    self._give_up(receive)

    def lend(self, peer: int) -> tuple[Any, ...] | None:
        """Let compiled code use this rank's ends of the rings to and from ``peer``, without locks.

        The caller must make all calls with that peer, one after the other. The loan ends once this
        rank reads ``pending`` of an end. Return the two ends, the sender's None before the first
        send; an empty tuple if the peer is this rank; None if the ends cannot be lent now.
        """
        if peer == self._rank:
            with self._lock:
                return None if self._receives or self._unclaimed else ()
        writer, reader = self._writers.get(peer), self._rings.get(peer)
        if reader is None or peer not in self._watched:
            return None
        if not self._try_carrying():
            return None
        try:
            with self._lock, self._guard:
                idle = reader.between and not (self._receives or self._unclaimed)
                lent = (
                    idle and not self._ending and self._aborted is None and peer not in self._gone
                )
                if lent:
                    reader.end.lend()
                    if writer is not None:
                        writer.end.lend()
            self._stop_carrying()
        finally:
            self._drop_carrying()
        return (writer and writer.end, reader.end) if lent else None

    def carry(self) -> None:
        """Move all messages that have arrived to the mailbox. Never blocks; thread-safe."""
        if not self._try_carrying():
            self._wake_carrier()
            return
        try:
            while self._carry(self._core.LOOK):
                pass
            self._stop_carrying()
        finally:
            self._drop_carrying()

    def lose(self, src: int, error: PeerLostError) -> None:
        """Record that member ``src`` is lost; its earlier messages can still be received."""
        with self._guard:
            self._gone.setdefault(src, error)
            self._ending.setdefault(src, error)
            self._endings_changed = True
            self._senders[src] = self._receivers[src] = None
            ring = self._writers.get(src)
            if ring is not None:
                ring.end.take_back()
        self.carry()
        if ring is not None:
            ring.end.wake_sender()

    def abort(self, reason: str) -> None:
        """See ``Mailbox.abort``; senders are woken as well."""
        super().abort(reason)
        self._wake_carrier()
        with self._guard:
            self._senders[:] = self._receivers[:] = [None] * self._size
            rings = list(self._writers.values())
        for end in (*(ring.end for ring in rings), *(ring.end for ring in self._rings.values())):
            end.take_back()
        for ring in rings:
            ring.end.wake_sender()

    def _watch(self, call: Call, src: int | None) -> None:
        """Watch the members from which this receive may get its message, to notice their loss."""
        for peer in self._rings if src is None else (src,):
            if peer not in self._rings or peer in self._watched:
                continue
            # A member that has not published its place has not sent a message either.
            if src is None and not self._host_peers.is_known(peer):
                continue
            self._host_peers.watch(peer, call)
            with self._guard:
                if self._aborted is None and peer not in self._gone:
                    self._receivers[peer] = self._rings[peer].end
            self._watched.add(peer)

    def _on_change(self) -> None:
        # The waiting thread may be the carrier, which sleeps on the wakeup word.
        if self._carriers not in ([], [threading.get_ident()]):
            self._wake_carrier()

    def _sleep(self, call: Call, receive: PendingReceive) -> None:
        """Carry messages until one has arrived, or wait for the carrier."""
        known = self._core.read_wakeup(self._memory)
        if not self._try_carrying():
            if any(ring.stalled for ring in self._rings.values()):
                self._wake_carrier()  # this receive may make room
            super()._sleep(call, receive)
            return
        self._lock.release()
        try:
            look()
            self._carry_and_wait(call, known)
            self._stop_carrying()
        finally:
            self._drop_carrying()
            self._lock.acquire()
        self._check_aborted()
        if call.deadline.expired:
            raise self._late(call, receive)

    def _try_carrying(self) -> bool:
        """Become the carrier; return False if a thread is the carrier already."""
        me = threading.get_ident()
        if self._carriers == [me] or not self._carrying.acquire(blocking=False):
            return False
        self._carriers.append(me)
        return True

    def _stop_carrying(self) -> None:
        """Let another thread become the carrier. The caller must not hold the mailbox's lock."""
        while True:
            self._carriers.clear()
            self._carrying.release()
            self._wake_carriers()
            # Another thread may have recorded a lost member while this one was the carrier.
            if not self._endings_changed or not self._try_carrying():
                return
            self._carry(self._core.LOOK)

    def _drop_carrying(self) -> None:
        """If this thread is still the carrier, because of an exception, stop being it."""
        if is_held(self._carrying):
            self._carriers.clear()
            self._carrying.release()
            self._wake_carriers()

    def _wake_carriers(self) -> None:
        """Wake the sleeping threads, of which one becomes the carrier."""
        with self._lock:
            for wake in self._asleep:
                wake.notify_all()

    def _carry_and_wait(self, call: Call, known: int) -> None:
        core = self._core
        mode = core.SPIN if call.sync else core.LOOK
        if self._carry(mode):
            return
        ends = tuple(ring.end for ring in self._rings.values() if ring.listens)
        if core.await_inbox(self._memory, ends, known, self._wait_mode(call)):
            self._carry(mode)

    def _carry(self, mode: int) -> bool:
        """Move up to one message from each ring; return whether any bytes were moved.

        ``mode``: how long to wait for the rest of an incomplete message.
        """
        moved = self._endings_changed = False
        for src, ring in self._rings.items():
            if ring.pull(self, mode):
                moved = True
            elif ring.breaks and src not in self._gone:
                ring.given_up = True
                name = self._membership.describe(src)
                what = "interrupted a message"
                if ring.damaged:
                    what = "wrote an invalid message: the shared memory is damaged"
                error = PeerLostError(f"{name} {what}", src)
                self._ending.setdefault(src, error)
        if self._ending:
            for src, error in list(self._ending.items()):
                if self._rings[src].end_with(error):
                    del self._ending[src]
                    self.fail(src, error)
                    moved = True
        return moved

    def _wake_carrier(self) -> None:
        """Make this rank's carrier read the rings again."""
        value = next(self._own_rings) * self._size + self._rank
        self._core.wake_inbox(self._memory, value)
