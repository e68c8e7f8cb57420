"""Point-to-point messages of one communicator: matches arriving messages with receives.

The delivering thread is a transport's reader, or the sender's thread if ranks share memory. It
announces a message with ``begin``, fills the returned memory and calls ``complete``. If a receive
already waits, this memory is its buffer, which saves a copy.

An announced message is matched at once with the oldest receive that accepts it. A receive gets the
oldest message that it accepts. So messages of one source and tag never overtake each other.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from transport._calls.call import Call
from transport._calls.codes import dtype_code, dtype_name
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._communicators.runtime import Membership
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._links.incoming import IncomingMessage, PendingReceive
from transport._operands.flat import as_bytes
from transport._operands.reduce_op import Flat
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import Condition

DEFAULT_LIMIT = 8 << 20


class Mailbox:
    """The unreceived messages for one member, and its waiting receives.

    ``limit`` bounds the bytes of unclaimed messages from one source. ``lost`` maps members that
    send nothing more to the reason. Mailboxes in one process may share ``lost``. They then also
    share ``waiting``, the mailboxes with waiting threads, on which ``fail`` has to be called.
    """

    def __init__(
        self,
        membership: Membership,
        limit: int = DEFAULT_LIMIT,
        lost: dict[int, Exception] | None = None,
        waiting: set[Mailbox] | None = None,
    ) -> None:
        self._membership = membership
        self._limit = limit
        self._lock = threading.RLock()
        self._room = Condition(self._lock)
        self._blocked = 0
        # The number of threads that wait for a message or for room, or are about to.
        self._waiters = 0
        self._waiting: set[Mailbox] = set() if waiting is None else waiting
        self._serials = itertools.count()
        self._unclaimed: dict[tuple[int, int], deque[IncomingMessage]] = {}  # by (tag, source)
        self._stored = [0] * membership.size
        self._receives: list[PendingReceive] = []
        self._asleep: set[Condition] = set()
        self._lost: dict[int, Exception] = {} if lost is None else lost
        self._arriving = 0
        self._aborted: str | None = None
        self.on_room: Callable[[], None] | None = None
        """Called under the mailbox's lock when there may be room, or a waiting receive, for a
        message that ``try_begin`` refused.
        """

    @property
    def receiving(self) -> bool:
        """True if a receive waits for the rest of a message."""
        return self._arriving > 0

    def left_over(self) -> list[str]:
        """Return descriptions of the unreceived messages: "2 from rank 1 under tag 7"."""
        with self._lock:
            return [
                f"{len(queue)} from {self._membership.describe(src)} under tag {tag}"
                for (tag, src), queue in self._unclaimed.items()
            ]

    # Called by transports.

    def begin(
        self, src: int, header: CallHeader, nbytes: int, deadline: Deadline | None = None
    ) -> IncomingMessage:
        """Announce a message of ``nbytes`` from ``src``; its tag is ``header.extra``.

        The delivering thread calls it in the order of arrival. The returned ``IncomingMessage``
        has the memory for the bytes: the buffer of a waiting receive, or storage. Blocks
        (backpressure) while ``limit`` bytes from ``src`` are unclaimed, unless a receiver waits for
        another message from ``src``, or ``src`` is this rank itself. Raises
        ``CommunicatorTimeoutError`` past ``deadline`` (None: no limit),
        ``CommunicatorAbortedError`` after ``abort`` or after ``fail`` for ``src``.
        """
        with self._lock:
            incoming = self._begin(src, header, nbytes)
            if incoming is not None:
                return incoming
            self._blocked += 1
            self._count_waiters(1)  # before the next check of lost members
            try:
                while True:
                    incoming = self._begin(src, header, nbytes)
                    if incoming is not None:
                        return incoming
                    self._await_space(src, deadline)
            finally:
                self._blocked -= 1
                self._count_waiters(-1)

    def try_begin(self, src: int, header: CallHeader, nbytes: int) -> IncomingMessage | None:
        """Announce a message as ``begin`` does, or return None if that would block."""
        with self._lock:
            return self._begin(src, header, nbytes)

    def deliver(
        self, src: int, header: CallHeader, payload: memoryview, deadline: Deadline | None = None
    ) -> None:
        """Deliver a whole message: ``begin``, copy, ``complete``."""
        incoming = self.begin(src, header, payload.nbytes, deadline)
        with incoming.guard:
            incoming.buffer[:] = payload
        incoming.complete()

    def fail(self, src: int, error: Exception) -> None:
        """Mark ``src`` as lost: it sends no more messages.

        Receives from ``src`` raise ``PeerLostError`` after its earlier messages were received. A
        receive from any source raises only when every other member is lost, because one member
        that has left must not fail a receive that other members can still satisfy.
        """
        with self._lock:
            self._lost.setdefault(src, error)
            for receive in list(self._receives):
                lost = self._lost_error(receive.src)
                if lost is not None:
                    self._receives.remove(receive)
                    receive.error = lost
                    receive.notify()
                    self._on_change()
            self._room.notify_all()

    def abort(self, reason: str) -> None:
        """Make all waiting threads raise ``CommunicatorAbortedError``. Never blocks; idempotent."""
        with self._lock:
            if self._aborted is not None:
                return
            self._aborted = reason
            self._unclaimed.clear()
            self._receives.clear()
            for wake in self._asleep:
                wake.notify_all()
            self._room.notify_all()

    def awaits(self, src: int) -> bool:
        """True if a receive waits for a message that ``src`` may send."""
        with self._lock:
            return any(receive.src is None or receive.src == src for receive in self._receives)

    # Called by ranks.

    def recv(self, call: Call, buffer: Flat, src: int | None, tag: int) -> int:
        """Receive as ``Communicator.recv`` does. Thread-safe.

        After ``CommunicatorTimeoutError`` or ``CommunicatorAbortedError``, ``buffer`` may hold a
        part of a message. The mailbox does not write to it any more, and discards the rest.
        """
        receive = PendingReceive(call, buffer, src, tag, dtype_code(buffer.dtype))
        with self._lock:
            self._check_aborted()
            call.waiting_for = src
            incoming = self._take(src, tag) if self._unclaimed else None
            try:
                if incoming is None:
                    incoming = self._await_match(call, receive)
                if not incoming.done:
                    self._await_bytes(call, receive, incoming)
            finally:
                self._give_up(receive)
            if incoming.stored:
                self._release(incoming)
            call.waiting_for = None
        if incoming.error is not None:
            raise PeerLostError.of(incoming.error, incoming.src)
        if receive.mismatch(incoming.header, incoming.buffer.nbytes):
            raise self._mismatch_error(receive, incoming)
        if incoming.stored:
            as_bytes(buffer)[:] = incoming.buffer
        return incoming.src

    def _await_rest(self, call: Call, receive: PendingReceive) -> None:
        """Wait for the rest of the message that is arriving in the buffer of ``receive``.

        If this raises, the caller has to call ``_give_up``.
        """
        incoming = receive.incoming
        assert incoming is not None
        with self._lock:
            self._check_aborted()
            self._await_bytes(call, receive, incoming)
        if incoming.error is not None:
            raise PeerLostError.of(incoming.error, incoming.src)

    # Under the lock.

    def _begin(self, src: int, header: CallHeader, nbytes: int) -> IncomingMessage | None:
        """Return the announced message with its memory; None if there is no room for it."""
        self._check_aborted()
        if src in self._lost:
            raise CommunicatorAbortedError(str(self._lost[src]))
        receive = self._match(src, header.extra)
        if receive is not None:
            self._on_change()
            return self._claim(receive, src, header, nbytes)
        return self._store(src, header, nbytes) if self._has_room(src, nbytes) else None

    def _on_change(self) -> None:
        """Handle a change for a waiting receive.

        For subclasses whose threads do not wait on ``PendingReceive.wake``.
        """

    def _match(self, src: int, tag: int) -> PendingReceive | None:
        """Return the oldest receive that accepts a message from ``src`` with ``tag``."""
        for receive in self._receives:
            if receive.tag == tag and (receive.src is None or receive.src == src):
                return receive
        return None

    def _claim(
        self, receive: PendingReceive, src: int, header: CallHeader, nbytes: int
    ) -> IncomingMessage:
        """Return the message with the receive's buffer, or with other memory if it does not fit."""
        wrong = receive.mismatch(header, nbytes)
        memory = np.empty(nbytes, np.uint8).data if wrong else as_bytes(receive.buffer)
        # After allocating memory: if that fails, the receive must stay.
        self._receives.remove(receive)
        incoming = IncomingMessage(self._lock, self._on_change, src, header, memory)
        incoming.receive = receive
        receive.incoming = incoming
        return incoming

    def _await_space(self, src: int, deadline: Deadline | None) -> None:
        arrived = self._room.wait(None if deadline is None else deadline.remaining())
        if not arrived and deadline is not None and deadline.expired:
            raise CommunicatorTimeoutError(
                f"send to {self._membership.describe(self._membership.rank)} passed its deadline"
                f" of {deadline.seconds:g} s: {self._stored[src]} earlier bytes are unreceived",
                self._membership.rank,
            )

    def _store(self, src: int, header: CallHeader, nbytes: int) -> IncomingMessage:
        incoming = IncomingMessage(
            self._lock, self._on_change, src, header, np.empty(nbytes, np.uint8).data
        )
        incoming.stored = True
        incoming.serial = next(self._serials)
        self._unclaimed.setdefault((header.extra, src), deque()).append(incoming)
        self._stored[src] += nbytes
        return incoming

    def _has_room(self, src: int, nbytes: int) -> bool:
        """True if a message without a receive may be stored.

        A receiver that waits for another tag of ``src`` may need a later message.
        """
        stored = self._stored[src]
        return (
            stored == 0
            or stored + nbytes <= self._limit
            or src == self._membership.rank
            or self.awaits(src)
        )

    def _take(self, src: int | None, tag: int) -> IncomingMessage | None:
        """Remove and return the oldest unclaimed message with ``tag`` from ``src`` (None: any)."""
        if src is None:
            heads = [
                (queue[0].serial, key) for key, queue in self._unclaimed.items() if key[0] == tag
            ]
            if not heads:
                return None
            key = min(heads)[1]
        else:
            key = (tag, src)
        queue = self._unclaimed.get(key)
        if queue is None:
            return None
        incoming = queue.popleft()
        if not queue:
            del self._unclaimed[key]
        return incoming

    def _release(self, incoming: IncomingMessage) -> None:
        """Free the memory of a stored message."""
        self._stored[incoming.src] -= incoming.buffer.nbytes
        self._signal_room()

    def _signal_room(self) -> None:
        if self._blocked:
            self._room.notify_all()
        if self.on_room is not None:
            self.on_room()

    def _await_match(self, call: Call, receive: PendingReceive) -> IncomingMessage:
        self._count_waiters(1)  # before the check of lost members
        try:
            lost = self._lost_error(receive.src)
            if lost is not None:
                raise lost
            self._receives.append(receive)
            self._signal_room()
            while receive.incoming is None:
                try:
                    self._sleep(call, receive)
                except CommunicatorTimeoutError:
                    if receive in self._receives:
                        self._receives.remove(receive)
                        raise
                    # A message or an error arrived at the same moment.
                if receive.error is not None:
                    raise receive.error
            return receive.incoming
        finally:
            self._count_waiters(-1)

    def _count_waiters(self, more: int) -> None:
        self._waiters += more
        if self._waiters:
            self._waiting.add(self)
        else:
            self._waiting.discard(self)

    def _await_bytes(self, call: Call, receive: PendingReceive, incoming: IncomingMessage) -> None:
        incoming.receive = receive
        receive.incoming = incoming
        self._arriving += 1
        try:
            while not incoming.done:
                self._sleep(call, receive)
        finally:
            self._arriving -= 1

    def _give_up(self, receive: PendingReceive) -> None:
        """Withdraw a receive and its buffer, unless it is complete. Releases the lock for a
        moment.
        """
        if receive in self._receives:
            self._receives.remove(receive)
        incoming = receive.incoming
        if incoming is None or incoming.done:
            return
        incoming.receive = None
        if incoming.stored:
            self._release(incoming)
            return
        # The thread with the guard may be about to acquire the lock.
        self._lock.release()
        try:
            with incoming.guard:
                incoming.buffer = np.empty(incoming.buffer.nbytes, np.uint8).data
        finally:
            self._lock.acquire()

    def _sleep(self, call: Call, receive: PendingReceive) -> None:
        """Wait for a notification; raise if the deadline passes before, or on abort."""
        wake = receive.wake
        if wake is None:
            wake = receive.wake = Condition(self._lock)
        self._asleep.add(wake)
        try:
            notified = wake.wait(call.deadline.remaining())
        finally:
            self._asleep.discard(wake)
        self._check_aborted()
        if not notified and call.deadline.expired:
            raise self._late(call, receive)

    def _late(self, call: Call, receive: PendingReceive) -> CommunicatorTimeoutError:
        """Return the error for a receive whose deadline has passed."""
        whom = "any member" if receive.src is None else self._membership.describe(receive.src)
        return CommunicatorTimeoutError(
            f"recv from {whom} with tag {receive.tag} passed its deadline of"
            f" {call.deadline.seconds:g} s",
            receive.src,
        )

    def _check_aborted(self) -> None:
        if self._aborted is not None:
            raise CommunicatorAbortedError(self._aborted)

    def _lost_error(self, src: int | None) -> PeerLostError | None:
        """Return the error for a receive from ``src`` that no message can satisfy any more."""
        if src is not None:
            lost = self._lost.get(src)
            return None if lost is None else PeerLostError.of(lost, src)
        others = self._membership.size - 1
        lost = len(self._lost) - (self._membership.rank in self._lost)
        if others and lost == others:
            peer, lost = next(iter(self._lost.items()))
            return PeerLostError(f"recv from any member: all others are gone ({lost})", peer)
        return None

    def _mismatch_error(
        self, receive: PendingReceive, incoming: IncomingMessage
    ) -> HeaderMismatchError:
        got = incoming.header
        expected = receive.call.header._replace(
            kind=Kind.SEND, dtype=receive.code, elements=receive.buffer.size, root=NO_ROOT
        )
        return HeaderMismatchError(
            f"recv from {self._membership.describe(incoming.src)} with tag {receive.tag}: the"
            f" message has {got.elements} elements of {dtype_name(got.dtype)}"
            f" ({incoming.buffer.nbytes} bytes), the buffer {receive.buffer.size} of"
            f" {dtype_name(receive.code)} ({receive.buffer.nbytes} bytes); the message is"
            " discarded, the buffer unchanged",
            incoming.src,
            expected,
            got,
        )
