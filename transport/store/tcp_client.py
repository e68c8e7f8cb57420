"""The client's end of a connection to a store server, shared by any number of threads.

There is no thread here. Requests carry ids; of the threads that wait for replies one reads, and
hands the others theirs, so that a wait of one thread does not hold up the calls of another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence

from transport.errors import DistStoreError
from transport.fork import refusal
from transport.store.wire import (
    NUMBER,
    REPLY,
    Frames,
    Op,
    Status,
    WireError,
    pack_request,
    unpack_fields,
)

# What a server may be late with the answer that it owes at a wait's end.
GRACE_SECONDS = 5.0
# A server that takes nothing for so long is lost.
_SEND_SECONDS = 60.0
_GOODBYE_SECONDS = 1.0
_RECEIVE_BYTES = 1 << 18
_TIMEVAL = struct.Struct("@ll")
_IDS = 1 << 32

Reply = tuple[Status, list[bytes]]


class StoreConnection:
    """Requests and their replies over one authenticated socket.

    ``name`` is the store's, for messages.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._name = name
        self._pid = os.getpid()
        self._send_lock = threading.Lock()
        self._next_id = 0
        self._waits_end = False
        self._state = threading.Condition(threading.Lock())
        self._frames = Frames(REPLY)
        self._expected: set[int] = set()
        self._replies: dict[int, Reply] = {}
        self._reading = False
        self._waiting = 0
        self._failure: str | None = None
        self._receive_seconds = -1.0
        # Time limits are the kernel's: a socket with Python's needs a poll before each call, and
        # threads that send and receive at the same time could not have different ones.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_SECONDS))

    def request(self, op: Op, fields: Sequence[bytes], seconds: float) -> Reply:
        """Send a request and return its reply, which the server owes within ``seconds``.

        Raises DistStoreError when the connection is closed or lost, the server silent, or this
        process a fork of the one that connected.
        """
        if why := refusal(self._name, self._pid, "a clone() made there"):
            raise DistStoreError(why)
        number = self._send(op, fields, seconds)
        try:
            status, answer = self._receive(number, time.monotonic() + seconds + GRACE_SECONDS)
        except BaseException:
            self._abandon(number)
            raise
        if status == Status.ERROR:
            raise DistStoreError(f"{self._name}: {answer[0].decode()}")
        return status, answer

    def end_waits(self, end: bool) -> None:
        """Have the waits that are under way, and later ones, time out at once; or no longer."""
        # A thread may be stuck in sending to a server that does not read: nor would this be read.
        locked = self._send_lock.acquire(timeout=_GOODBYE_SECONDS)
        try:
            self._waits_end = end
            with self._state:
                waiting = list(self._expected) if end and locked and not self._failure else []
            try:
                for number in waiting:
                    self._sock.sendall(pack_request(0, Op.CANCEL, 0.0, (NUMBER.pack(number),)))
            except OSError as error:
                self._fail(f"sending failed: {error}")
        finally:
            if locked:
                self._send_lock.release()

    def close(self, *, goodbye: bool = True) -> None:
        """Hang up, after a ``goodbye`` or as if this process had died.

        Threads that wait here get a DistStoreError. Idempotent.
        """
        if os.getpid() != self._pid:
            # The connection is the parent's: nothing may be said on it. Forking closed our copy.
            return
        with self._state:
            if self._failure == _CLOSED:
                return
            lost = self._failure is not None
            self._failure = _CLOSED
            self._state.notify_all()
        # A thread may be stuck in sending to a server that does not read: then without goodbye.
        if goodbye and not lost and self._send_lock.acquire(timeout=_GOODBYE_SECONDS):
            with contextlib.suppress(OSError):
                self._sock.send(pack_request(0, Op.GOODBYE, 0.0, ()), socket.MSG_DONTWAIT)
                self._sock.shutdown(socket.SHUT_WR)
                self._drain()
            self._send_lock.release()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._state:
            # Whoever reads is woken by the shutdown; a descriptor must not be closed under it.
            self._state.wait_for(lambda: not self._reading, timeout=GRACE_SECONDS)
        self._sock.close()

    def _drain(self) -> None:
        """Wait until the server has hung up: closing before would take back the goodbye, if there
        are answers that nobody read.
        """
        until = time.monotonic() + _GOODBYE_SECONDS
        with self._state:
            if self._state.wait_for(lambda: not self._reading, timeout=_GOODBYE_SECONDS):
                self._reading = True
            else:
                return
        try:
            while (left := until - time.monotonic()) > 0:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
                if not self._sock.recv(_RECEIVE_BYTES):
                    return
        finally:
            with self._state:
                self._reading = False

    def _send(self, op: Op, fields: Sequence[bytes], seconds: float) -> int:
        with self._send_lock:
            number = self._next_id = (self._next_id + 1) % _IDS
            data = pack_request(number, op, 0.0 if self._waits_end else seconds, fields)
            with self._state:
                self._check()
                self._expected.add(number)
            try:
                self._sock.sendall(data)
            except BaseException as error:
                # A part may be out: nothing that we could send now would make sense.
                self._fail(f"sending failed: {error}")
                if not isinstance(error, OSError):
                    raise
                raise self._error() from error
        return number

    def _receive(self, number: int, until: float) -> Reply:
        with self._state:
            while True:
                reply = self._replies.pop(number, None)
                if reply is not None:
                    return reply
                self._check()
                if not self._reading:
                    self._reading = True
                    break
                self._waiting += 1
                try:
                    self._state.wait(max(0.0, until - time.monotonic()))
                finally:
                    self._waiting -= 1
                if time.monotonic() >= until and number not in self._replies:
                    raise self._silence()
        try:
            while True:
                reply = self._read_for(number, until)
                if reply is not None:
                    return reply
        finally:
            with self._state:
                self._reading = False
                if self._waiting or self._failure:
                    self._state.notify_all()

    def _read_for(self, number: int, until: float) -> Reply | None:
        """Read once, hand out what came, return this thread's reply when it is among it."""
        left = until - time.monotonic()
        if left <= 0:
            raise self._silence()
        # Rounded up, so that equal timeouts do not cost a system call each.
        if not left <= self._receive_seconds <= left + 1.0:
            self._receive_seconds = left + 0.5
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._receive_seconds)
            )
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            self._fail(f"receiving failed: {error}")
            raise self._error() from error
        if not data:
            self._fail("the server hung up")
            raise self._error()
        mine: Reply | None = None
        try:
            for frame in self._frames.feed(data):
                _, replied, status = REPLY.unpack_from(frame)
                reply = Status(status), unpack_fields(frame, REPLY.size, len(frame))
                if replied == number:
                    mine = reply
                    self._expected.discard(number)
                    continue
                with self._state:
                    if replied in self._expected:
                        self._expected.discard(replied)
                        self._replies[replied] = reply
                        self._state.notify_all()
        except (WireError, ValueError) as error:
            self._fail(f"the server sent what is no reply: {error}")
            raise self._error() from error
        return mine

    def _abandon(self, number: int) -> None:
        """Forget a request whose thread gave up (an error, or Ctrl-C)."""
        with self._state:
            self._replies.pop(number, None)
            waiting = number in self._expected
            self._expected.discard(number)
            if not waiting or self._failure:
                return
        # Else a wait that nobody waits for could still take a value from a queue.
        if self._send_lock.acquire(blocking=False):
            with contextlib.suppress(OSError):
                data = pack_request(0, Op.CANCEL, 0.0, (NUMBER.pack(number),))
                if self._sock.send(data, socket.MSG_DONTWAIT) != len(data):
                    self._fail("sending failed")
            self._send_lock.release()

    def _check(self) -> None:
        if self._failure:
            raise self._error()

    def _error(self) -> DistStoreError:
        if self._failure == _CLOSED:
            return DistStoreError(f"{self._name} is closed")
        return DistStoreError(f"{self._name}: the connection is lost ({self._failure})")

    def _silence(self) -> DistStoreError:
        return DistStoreError(f"{self._name}: the server did not answer in time")

    def _fail(self, reason: str) -> None:
        with self._state:
            if self._failure is None:
                self._failure = reason
            self._state.notify_all()


_CLOSED = "closed"


def _timeval(seconds: float) -> bytes:
    """Return a time limit for setsockopt; 0 would mean none."""
    micros = max(1, min(int(seconds * 1e6), 10**15))
    return _TIMEVAL.pack(micros // 10**6, micros % 10**6)
