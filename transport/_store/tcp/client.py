"""The client's end of a connection to a store server, shared by any number of threads.

This module starts no thread. Requests have ids. One of the threads that wait for replies reads the
socket, and passes the other threads their replies. So one thread's wait does not delay another
thread's call.

A signal handler may make a request at any step of an interrupted request of its thread. So one C
call both moves bytes and records that they were sent or received (``extend`` over ``map``). A
received frame is delivered, possibly twice, before it is dropped. Both locks are reentrant
(``RLock``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue

from transport._errors import DistStoreError, StoreSilentError
from transport._net.fork import refusal
from transport._net.reach import is_out_of_reach
from transport._store.commands import Op
from transport._store.fields import LENGTH_BYTES, WireError, pack_number, unpack_fields
from transport._store.tcp.wire import REPLY, Status, frame_size, pack_request
from transport._waiting.interrupts import SLICE_SECONDS, next_slice, sliced

# How long after a wait's end the server may answer.
GRACE_SECONDS = 5.0
# A server that accepts no bytes for this long is lost.
_SEND_SECONDS = 60.0
_GOODBYE_SECONDS = 1.0
# A waiting thread checks at this interval whether it missed a wakeup.
_SLICE_SECONDS = 5.0
# The interval for a wait with a breaker, in case the server does not answer the cancellation.
_BREAKABLE_SECONDS = 0.25
_RECEIVE_BYTES = 1 << 18
_TIMEVAL = struct.Struct("@ll")
_IDS = 1 << 32

Reply = tuple[Status, list[bytes]]


class _StoreRequest:
    """A pending request. ``wakeups`` wakes its thread; ``breaker`` can end its wait."""

    __slots__ = ("breaker", "reply", "wakeups")

    def __init__(self, breaker: Breaker | None = None) -> None:
        self.breaker = breaker
        self.wakeups: SimpleQueue[None] = SimpleQueue()
        self.reply: Reply | None = None


class _SendBuffer:
    """Bytes to send, and the number of bytes that each system call sent."""

    __slots__ = ("data", "taken")

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.taken: list[int] = []


class Breaker:
    """Ends the waits of one user of a shared connection."""

    def __init__(self) -> None:
        self.broken: bool = False
        self.numbers: set[int] = set()


class StoreConnection:
    """Requests and their replies over one authenticated socket.

    ``name`` is the store's name in error messages.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._expected: dict[int, _StoreRequest] = {}
        self._waits_end: set[Breaker | None] = set()
        self._failure: str | None = None
        self._unreachable = False
        # Any thread may append to the queue. All other uses hold the send lock.
        self._send_lock = threading.RLock()
        self._send_queue: deque[_SendBuffer] = deque()
        # Held by the reading thread; guards the next three fields.
        self._turn = threading.RLock()
        self._received: list[bytes] = []
        self._needed = LENGTH_BYTES
        self._receive_seconds = -1.0
        # Timeouts are set in the kernel: Python's would cost a poll before each call, and be the
        # same for sending and receiving threads.
        sock.settimeout(None)

    def request(
        self,
        op: Op,
        fields: Sequence[bytes],
        seconds: float,
        grace: float | None = None,
        breaker: Breaker | None = None,
    ) -> Reply:
        """Send a request and return its reply.

        The server has to reply within ``seconds`` plus ``grace`` (default: ``GRACE_SECONDS``).

        Raises DistStoreError if the connection is closed or lost, the server is silent, ``breaker``
        ended the request, or this process is a fork of the one that connected.
        """
        self._check_process()
        number = next(self._numbers) % _IDS
        data = pack_request(number, op, 0.0 if breaker in self._waits_end else seconds, fields)
        request = _StoreRequest(breaker)
        try:
            if breaker is not None:
                breaker.numbers.add(number)
            self._send(number, request, data, _SEND_SECONDS if grace is None else grace)
            within = seconds + (GRACE_SECONDS if grace is None else grace)
            status, answer = self._receive(request, within)
        finally:
            if request.reply is None:
                self._cancel(number)
                self._wake()
            self._expected.pop(number, None)
            if breaker is not None:
                breaker.numbers.discard(number)
        if status == Status.ERROR:
            raise DistStoreError(f"{self._name}: {answer[0].decode()}")
        return status, answer

    def post(self, op: Op, fields: Sequence[bytes]) -> None:
        """Send a request without waiting for its reply, which a later request discards.

        Raises DistStoreError if the connection is closed or lost, or in a forked child.
        """
        self._check_process()
        self._check()
        self._send_queue.append(_SendBuffer(pack_request(0, op, 0.0, fields)))
        self._flush_soon()

    def end_waits_of(self, breaker: Breaker) -> None:
        """Make current and later requests with this ``breaker`` raise DistStoreError.

        Thread-safe; never blocks.
        """
        breaker.broken = True
        if os.getpid() != self._pid:
            return
        for number in breaker.numbers.copy():
            # The server's answer wakes a thread that is blocked in the socket.
            self._send_queue.append(_cancel(number))
            request = self._expected.get(number)
            if request is not None:
                request.wakeups.put(None)
        if self._failure is None:
            with contextlib.suppress(DistStoreError):
                self._flush_if_free()

    def _check_process(self) -> None:
        if why := refusal(self._name, self._pid, "a clone() made there"):
            raise DistStoreError(why)

    def end_waits(self, end: bool, breaker: Breaker | None = None) -> None:
        """Make current and later waits time out at once; with ``end`` False, stop doing so.

        Only waits with this ``breaker`` are affected; None: only those without one.
        """
        (self._waits_end.add if end else self._waits_end.discard)(breaker)
        if not end or self._failure is not None:
            return
        for number, request in list(self._expected.items()):
            if request.breaker is breaker:
                self._send_queue.append(_cancel(number))
        # If a thread is stuck in sending, the server does not read: skip the cancellations.
        if self._send_lock.acquire(timeout=_GOODBYE_SECONDS):
            try:
                with contextlib.suppress(DistStoreError):
                    self._flush(time.monotonic() + _GOODBYE_SECONDS)
            finally:
                self._send_lock.release()

    def hang_up(self) -> None:
        """End the connection without a goodbye; waiting threads get a DistStoreError.

        Thread-safe; never blocks. ``close`` must still be called.
        """
        if os.getpid() != self._pid:
            return
        self._fail("this end hung up")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self, *, goodbye: bool = True) -> None:
        """Hang up, after a ``goodbye`` or as if this process had died.

        Waiting threads get a DistStoreError. Idempotent.
        """
        if os.getpid() != self._pid:
            # The connection is the parent's: send nothing. A hook has closed this fork's copy.
            return
        if self._failure == _CLOSED:
            return
        lost = self._failure is not None
        self._failure = _CLOSED
        self._wake()
        # If a thread is stuck in sending to a server that does not read, skip the goodbye.
        if goodbye and not lost and self._send_lock.acquire(timeout=_GOODBYE_SECONDS):
            try:
                self._send_goodbye()
            finally:
                self._send_lock.release()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # The shutdown wakes the reading thread; close the descriptor only after it has left.
        if self._turn.acquire(timeout=GRACE_SECONDS):
            self._turn.release()
        self._sock.close()

    def _send_goodbye(self) -> None:
        """Withdraw the will (``Op.SET_WILL``), and wait until the server hangs up.

        The caller holds the send lock. Closing earlier, with unread answers, would discard the
        goodbye.
        """
        self._send_queue.append(_SendBuffer(pack_request(0, Op.GOODBYE, 0.0, ())))
        with contextlib.suppress(OSError, DistStoreError):
            self._flush()
            self._sock.shutdown(socket.SHUT_WR)
        if not self._turn.acquire(timeout=_GOODBYE_SECONDS):
            return
        until = time.monotonic() + _GOODBYE_SECONDS
        try:
            while (left := until - time.monotonic()) > 0:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
                if not self._sock.recv(_RECEIVE_BYTES):
                    break
        except OSError:
            pass
        finally:
            self._turn.release()

    # Sending.

    def _send(self, number: int, request: _StoreRequest, data: bytes, seconds: float) -> None:
        self._expected[number] = request
        self._check()
        self._send_queue.append(_SendBuffer(data))
        if request.breaker in self._waits_end:  # perhaps since the data was packed
            self._send_queue.append(_cancel(number))
        self._flush_soon(seconds)

    def _flush_soon(self, seconds: float = _SEND_SECONDS) -> None:
        """Send all queued bytes within ``seconds``."""
        if not sliced(partial(self._send_lock.acquire, True), seconds):
            raise DistStoreError(f"{self._name}: another thread has been sending for too long")
        try:
            self._flush(seconds)
        finally:
            self._send_lock.release()

    def _flush(self, seconds: float | None = None) -> None:
        """Send the queued bytes within ``seconds``; by default only what can be sent without
        blocking. The caller holds the send lock.

        A server that accepts no bytes for ``_SEND_SECONDS`` is lost.

        Raises DistStoreError if the connection is lost or some bytes were not sent in time.
        """
        until = None if seconds is None else time.monotonic() + min(seconds, _SEND_SECONDS)
        send_queue = self._send_queue
        while send_queue:
            first = send_queue[0]
            done = sum(first.taken)
            if done == len(first.data):
                send_queue.popleft()
                continue
            try:
                rest = first.data[done:]
                first.taken.extend(map(self._sock.send, (rest,), (socket.MSG_DONTWAIT,)))
            except BlockingIOError:
                if seconds is None or until is None:
                    return
                if not self._await_room(until):
                    if seconds < _SEND_SECONDS:
                        raise self._silence(seconds) from None
                    why = f"sending failed: the server read nothing for {_SEND_SECONDS:g} s"
                    self._fail(why, unreachable=True)
                    raise self._error() from None
            except OSError as error:
                self._fail(f"sending failed: {error}", is_out_of_reach(error))
                raise self._error() from error

    def _await_room(self, until: float) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLOUT)
        return sliced(lambda left: poller.poll(left * 1000), until - time.monotonic())

    def _flush_if_free(self) -> None:
        """Send without blocking. If another thread is sending, it or the next sender sends the
        queued bytes.
        """
        if self._send_lock.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._send_lock.release()

    # Receiving.

    def _receive(self, request: _StoreRequest, seconds: float) -> Reply:
        breaker = request.breaker
        until = time.monotonic() + seconds
        while request.reply is None:
            self._check()
            if breaker is not None and breaker.broken:
                raise DistStoreError(f"{self._name}: the wait was interrupted")
            left = until - time.monotonic()
            if left <= 0:
                raise self._silence(seconds)
            if self._turn.acquire(blocking=False):
                try:
                    self._read_for(request, until)
                finally:
                    self._turn.release()
                    if len(self._expected) > 1:
                        self._wake()
            else:
                with contextlib.suppress(Empty):
                    request.wakeups.get(timeout=next_slice(min(left, _SLICE_SECONDS)))
        return request.reply

    def _read_for(self, request: _StoreRequest, until: float) -> None:
        """Read and deliver replies until this request has its reply, or until the deadline."""
        breaker = request.breaker
        if self._received:
            self._deliver()  # bytes that a thread read before it was interrupted
        slice_ = _SLICE_SECONDS if breaker is None else _BREAKABLE_SECONDS
        while request.reply is None and (left := until - time.monotonic()) > 0:
            if breaker is not None and breaker.broken:
                return
            left = next_slice(min(left, slice_))
            # Rounded up, to save a system call for each of several equal timeouts.
            spare = 0.0 if left <= SLICE_SECONDS else 1.0
            if not left <= self._receive_seconds <= left + spare:
                self._receive_seconds = left + spare / 2
                self._sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._receive_seconds)
                )
            try:
                self._received.extend(map(self._sock.recv, (_RECEIVE_BYTES,)))
            except BlockingIOError:
                continue
            except OSError as error:
                self._fail(f"receiving failed: {error}", is_out_of_reach(error))
                raise self._error() from error
            self._deliver()

    def _deliver(self) -> None:
        """Deliver the replies received so far. The caller holds the turn."""
        received = self._received
        if sum(map(len, received)) >= self._needed:
            data = b"".join(received)
            try:
                begin, needed = self._deliver_from(data)
            except (WireError, ValueError) as error:
                self._fail(f"the server sent an invalid reply: {error}")
                raise self._error() from error
            self._needed = LENGTH_BYTES
            received[:] = [data[begin:]] if begin < len(data) else []
            self._needed = needed
        elif received and not received[-1]:
            self._fail("the server hung up")
            raise self._error()

    def _deliver_from(self, data: bytes) -> tuple[int, int]:
        """Deliver the complete replies in ``data``. Return the offset behind the last one, and
        the bytes needed for the next.
        """
        begin = 0
        while len(data) - begin >= LENGTH_BYTES:
            size = frame_size(data, begin, REPLY.size)
            if begin + size > len(data):
                return begin, size
            _, replied, status = REPLY.unpack_from(data, begin)
            reply = Status(status), unpack_fields(data, begin + REPLY.size, begin + size)
            request = self._expected.get(replied)
            if request is not None:
                request.reply = reply
                request.wakeups.put(None)
            begin += size
        return begin, LENGTH_BYTES

    # The end of a request or of the connection.

    def _cancel(self, number: int) -> None:
        """Withdraw a request: an abandoned wait could still take a value from a queue."""
        request = self._expected.get(number)
        if request is not None and request.reply is None and self._failure is None:
            self._send_queue.append(_cancel(number))
            with contextlib.suppress(DistStoreError):
                self._flush_if_free()

    def _wake(self) -> None:
        """Wake all waiting threads: one of them has to read."""
        for request in list(self._expected.values()):
            request.wakeups.put(None)

    def _check(self) -> None:
        if self._failure:
            raise self._error()

    def _error(self) -> DistStoreError:
        if self._failure == _CLOSED:
            return DistStoreError(f"{self._name} is closed")
        kind = StoreSilentError if self._unreachable else DistStoreError
        return kind(f"{self._name}: the connection is lost ({self._failure})")

    def _silence(self, seconds: float) -> DistStoreError:
        return StoreSilentError(f"{self._name}: the server did not answer in time", seconds)

    def _fail(self, reason: str, unreachable: bool = False) -> None:
        if self._failure is None:
            self._unreachable = unreachable
            self._failure = reason
        self._wake()


def _cancel(number: int) -> _SendBuffer:
    return _SendBuffer(pack_request(0, Op.CANCEL, 0.0, (pack_number(number),)))


_CLOSED = "closed"


def _timeval(seconds: float) -> bytes:
    """Return a timeout for setsockopt, at least 1 µs, because 0 means none."""
    micros = max(1, min(int(seconds * 1e6), 10**15))
    return _TIMEVAL.pack(micros // 10**6, micros % 10**6)
