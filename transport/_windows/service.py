"""Windows by messages: a thread of this process handles other members' requests on its memory.

Frames between two members arrive and are handled in order, so a reply to a frame shows that all
earlier frames are done. No frame is resent: a peer whose connection breaks is lost.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from transport._calls.call import Call
from transport._channel.channel import Channel
from transport._channel.connection import ChannelConnection
from transport._channel.frames import FIRST_KIND, ChannelFrame
from transport._channel.threads import ThreadPool
from transport._communicators.runtime import Membership
from transport._errors import CommunicatorTimeoutError, DistError, PeerLostError
from transport._operands.reduce_op import Flat
from transport._store.prefix_store import PrefixStore
from transport._waiting.interrupts import next_slice
from transport._windows.memory import SLICE_SECONDS, Late, MappedMemory

_LOGGER = logging.getLogger("meshlib.transport")
_HEAD = struct.Struct("<QQQBBBB")
"""Window, offset, bytes; for updates: dtype, op, whether expected values follow, whether to wake.
"""
_INLINE_BYTES = 4096
"""Longer values are sent as a buffer of the frame."""
_FLUSH_SECONDS = 1.0


class _WindowOp(IntEnum):
    """The kinds of requests, and the reply."""

    PUT = FIRST_KIND
    GET = FIRST_KIND + 1
    UPDATE = FIRST_KIND + 2
    REPLY = FIRST_KIND + 3


_REPLIES = 1
"""A flag: the sender waits for the reply."""


class _WindowRequest:
    """A frame that awaits its reply."""

    __slots__ = ("done", "error", "late", "value")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.late: Late | None = None
        self.value: bytes | memoryview = b""
        self.error: Exception | None = None


class WindowService:
    """One member's end of the messages for a group's windows, until ``close``."""

    def __init__(self, membership: Membership) -> None:
        self._describe = membership.describe
        self._windows: dict[int, MappedMemory] = {}
        self._numbers = itertools.count(1)
        self._settling = threading.Lock()
        """Decides the race between a request's reply and its timeout."""
        self._lost: dict[int, str] = {}
        """The reasons by lost member. Frames sent to a lost member may not have arrived."""
        own = replace(
            membership,
            group=f"{membership.group}/windows",
            store=PrefixStore("windows", membership.store),
        )
        name = f"meshlib-windows-{membership.ranks[membership.rank]}"
        self._threads = ThreadPool(name, 1, lambda: None, _log_error)
        self._channel = Channel(own, self._threads, membership.describe)
        self._channel.open(self)

    def serve(self, number: int, memory: MappedMemory) -> None:
        """Make ``memory`` accessible to other members as window ``number``."""
        self._windows[number] = memory

    def withdraw(self, number: int) -> None:
        """Stop serving window ``number``."""
        self._windows.pop(number, None)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._channel.close(_FLUSH_SECONDS)
        self._threads.close()

    # ------------------------------------------------------------------ requests to other members

    def post(self, call: Call | None, rank: int, kind: int, head: bytes, *values: Any) -> bool:
        """Send a frame that gets no reply, with a copy of ``values``.

        Without a ``call``, returns False if sending would block or fails. With one, raises
        CommunicatorTimeoutError past its deadline and PeerLostError if the connection breaks.
        """
        connection = self._channel.connected(rank)
        usable = connection is not None and not connection.is_choked and rank not in self._lost
        if call is None and not usable:
            return False
        try:
            if call is not None:
                connection = self.connect(call, rank)
                if connection.is_choked:
                    connection.wait_for_room(call.deadline.remaining())
                    self._check_late(call, rank)
            assert connection is not None
            self._send(connection, kind, next(self._numbers), head, values)
        except CommunicatorTimeoutError:
            raise
        except OSError as error:
            self._lost.setdefault(rank, str(error))
            if call is None:
                return False
            raise self._lost_error(rank) from error
        return True

    def request(
        self, call: Call, rank: int, kind: int, head: bytes, *values: Any, late: Late | None = None
    ) -> bytes | memoryview:
        """Send a frame and return its reply.

        Raises PeerLostError if the connection breaks, CommunicatorTimeoutError past the deadline.
        ``late`` is called with a reply that arrives after the deadline.
        """
        request, number = _WindowRequest(), next(self._numbers)
        connection = self.connect(call, rank)
        connection.pending[number] = request
        call.waiting_for = rank
        try:
            self._send(connection, kind, number, head, values, _REPLIES)
            connection.read_until(lambda: request.done.is_set() or call.deadline.expired)
            while not request.done.wait(min(next_slice(call.deadline.remaining()), SLICE_SECONDS)):
                if connection.error is not None:
                    raise ConnectionError(str(connection.error))
                self._check_late(call, rank)
            if request.error is not None:
                raise request.error
        except CommunicatorTimeoutError:
            with self._settling:
                if not request.done.is_set():
                    request.late = late
                    raise
        except OSError as error:
            self._lost.setdefault(rank, str(error))
            raise self._lost_error(rank) from error
        finally:
            if request.late is None:
                connection.pending.pop(number, None)
        call.waiting_for = None
        return request.value

    def connect(self, call: Call, rank: int) -> ChannelConnection:
        """Return the connection to member ``rank``. Raises PeerLostError if it is lost."""
        if rank in self._lost:
            raise self._lost_error(rank)
        return self._channel.connect(rank, call.deadline)

    def _check_late(self, call: Call, rank: int) -> None:
        if call.deadline.expired:
            who, seconds = self._describe(rank), call.deadline.seconds
            raise CommunicatorTimeoutError(f"{who} has not answered within {seconds:g} s", rank)

    def _send(
        self,
        connection: ChannelConnection,
        kind: int,
        number: int,
        head: bytes,
        values: Sequence[Any],
        flags: int = 0,
    ) -> None:
        data = b"".join(values)
        if len(data) <= _INLINE_BYTES:
            connection.send(kind, number, head + data, flags=flags)
        else:
            connection.send(kind, number, head, [memoryview(data)], flags)

    def _lost_error(self, rank: int) -> PeerLostError:
        why = f"its connection broke ({self._lost[rank]}); unflushed operations may be lost"
        return PeerLostError(f"{self._describe(rank)} is lost: {why}", rank)

    # ------------------------------------------------------------------ the channel's protocol

    def on_frames(self, connection: ChannelConnection, frames: Sequence[ChannelFrame]) -> bool:
        """Handle frames: requests of the peer, or replies to this member's requests."""
        for frame in frames:
            head: bytes | memoryview = frame.data
            if frame.buffers:
                (values,) = connection.fetch(frame)
                connection.acknowledge(frame)
            else:
                cut = 0 if connection.outgoing else _HEAD.size
                head, values = frame.data[:cut], frame.data[cut:]
            if not connection.outgoing:
                self._act(connection, frame, head, values)
            elif (request := connection.pending.pop(frame.number, None)) is not None:
                connection.reclaim(frame.number)
                with self._settling:
                    request.value = values
                    request.done.set()
                if request.late is not None:
                    request.late(values)
        return connection.outgoing or not connection.is_choked

    def _act(
        self, connection: ChannelConnection, frame: ChannelFrame, head: Any, values: Any
    ) -> None:
        reply: Any = b""
        try:
            number, offset, nbytes, code, op, compares, wakes = _HEAD.unpack(head)
            memory = self._windows[number]
            if offset + nbytes > memory.data.nbytes:
                raise ValueError(f"{nbytes} bytes at {offset} exceed {memory.data.nbytes} bytes")
            match frame.kind:
                case _WindowOp.PUT if len(values) == nbytes:
                    memory.put(None, offset, values)
                case _WindowOp.GET:
                    reply = memory.get(None, offset, nbytes)
                case _WindowOp.UPDATE if len(values) == nbytes * (1 + compares):
                    new, expected = values[:nbytes], values[nbytes:]
                    if compares or frame.flags & _REPLIES:
                        reply = memory.update(None, offset, code, op, new, expected)
                    else:
                        memory.combine(None, offset, code, op, new, bool(wakes))
                case _:
                    raise ValueError(f"unexpected kind {frame.kind} or size {len(values)}")
        except Exception as error:  # The thread must survive any bad frame, to serve other peers.
            raise ConnectionError(f"a peer's request on a window is invalid: {error!r}") from error
        if frame.flags & _REPLIES:
            data = memoryview(reply)
            if data.nbytes <= _INLINE_BYTES:
                connection.send(_WindowOp.REPLY, frame.number, bytes(data))
            else:
                connection.send(_WindowOp.REPLY, frame.number, b"", [data])

    def on_post(self, connection: ChannelConnection, data: bytes | memoryview) -> None:
        """Raise ConnectionError, because windows use no posts."""
        raise ConnectionError(f"expected no post, got {len(data)} bytes")

    def on_end(self, connection: ChannelConnection, error: Exception) -> None:
        """Mark the peer of an ended connection as lost, and fail its pending requests."""
        if connection.outgoing:
            self._lost.setdefault(connection.peer, str(error))
            for request in [*connection.pending.values()]:
                request.error = ConnectionError(str(error))
                request.done.set()

    def on_refusal(self, peer: int, error: DistError) -> DistError:
        """Return ``error``, raised when connecting to member ``peer`` failed, unchanged."""
        return error


class RemoteMemory:
    """A target that accesses member ``rank``'s memory of window ``number`` by messages."""

    direct = False

    def __init__(self, service: WindowService, rank: int, number: int) -> None:
        self._service = service
        self._rank = rank
        self._number = number

    def put(self, call: Call | None, offset: int, values: Flat) -> bool:
        head = self._head(offset, values.nbytes)
        return self._service.post(call, self._rank, _WindowOp.PUT, head, values.data)

    def get(self, call: Call | None, offset: int, nbytes: int) -> memoryview:
        return self._request(call, _WindowOp.GET, self._head(offset, nbytes))

    def combine(
        self, call: Call | None, offset: int, code: int, op: int, values: Any, wakes: bool = False
    ) -> bool:
        head = self._head(offset, len(values), code, op, False, wakes)
        return self._service.post(call, self._rank, _WindowOp.UPDATE, head, values)

    def update(
        self,
        call: Call | None,
        offset: int,
        code: int,
        op: int,
        values: Any,
        expected: Any = b"",
        late: Late | None = None,
    ) -> bytes:
        head = self._head(offset, len(values), code, op, bool(expected), False)
        return bytes(self._request(call, _WindowOp.UPDATE, head, values, expected, late=late))

    def flush(self, call: Call | None) -> None:
        self.get(call, 0, 0)  # Its reply arrives after all earlier frames are done.

    def check(self, call: Call) -> None:
        self._service.connect(call, self._rank)

    def _request(
        self, call: Call | None, kind: int, head: bytes, *values: Any, late: Late | None = None
    ) -> memoryview:
        assert call is not None  # Operations that wait on remote memory always have a call.
        return memoryview(self._service.request(call, self._rank, kind, head, *values, late=late))

    def _head(self, offset: int, nbytes: int, *update: int) -> bytes:
        return _HEAD.pack(self._number, offset, nbytes, *(update or (0, 0, 0, 0)))


def _log_error(error: BaseException) -> None:
    _LOGGER.error("a window's thread raised an exception", exc_info=error)
