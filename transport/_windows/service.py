"""Windows by messages: this process's threads handle other members' requests on its memory.

Frames between two members arrive in order, and each is handled before the next. So a reply to a
frame shows that all earlier frames are done. Nothing is sent twice: a peer whose connection breaks
is lost.
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
"""Window, offset, bytes; of updates: dtype, op, whether values to compare follow, whether it wakes.
"""
_INLINE_BYTES = 4096
"""Longer values are a buffer of the frame."""
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
    """Carries one member's windows of a group by messages, from now until ``close``."""

    def __init__(self, membership: Membership) -> None:
        self._describe = membership.describe
        self._windows: dict[int, MappedMemory] = {}
        self._numbers = itertools.count(1)
        self._settling = threading.Lock()
        """Decides whether a reply is late."""
        self._lost: dict[int, str] = {}
        """The reason by lost member. Frames sent to such a member may not have arrived."""
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
        """Let other members reach this one's ``memory`` of the window ``number``."""
        self._windows[number] = memory

    def withdraw(self, number: int) -> None:
        """End serving the window ``number``."""
        self._windows.pop(number, None)

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._channel.close(_FLUSH_SECONDS)
        self._threads.close()

    # ------------------------------------------------------------------ asking

    def post(self, call: Call | None, rank: int, kind: int, head: bytes, *values: Any) -> bool:
        """Send a frame that gets no reply, with a copy of ``values``.

        Without a ``call``, it returns False and sends nothing if sending would block or fails.
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
        """Send a frame and return the bytes of its reply.

        Raises PeerLostError if the connection breaks. Raises CommunicatorTimeoutError past the
        deadline; ``late`` then gets the reply when it arrives.
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
        """Return the connection to member ``rank``. Raises PeerLostError if that is lost."""
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
        why = f"its connection broke ({self._lost[rank]}), with all that was not flushed"
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
                raise ValueError(f"{nbytes} bytes at {offset} of {memory.data.nbytes}")
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
                    raise ValueError(f"a frame of kind {frame.kind} with {len(values)} bytes")
        except Exception as error:  # any bad frame: the thread serves other peers as well
            raise ConnectionError(f"a peer's request on a window is invalid: {error!r}") from error
        if frame.flags & _REPLIES:
            data = memoryview(reply)
            if data.nbytes <= _INLINE_BYTES:
                connection.send(_WindowOp.REPLY, frame.number, bytes(data))
            else:
                connection.send(_WindowOp.REPLY, frame.number, b"", [data])

    def on_post(self, connection: ChannelConnection, data: bytes | memoryview) -> None:
        """Refuse: windows post nothing."""
        raise ConnectionError(f"expected no post, got {len(data)} bytes")

    def on_end(self, connection: ChannelConnection, error: Exception) -> None:
        """Note that a connection has ended: nothing more is sent to its peer."""
        if connection.outgoing:
            self._lost.setdefault(connection.peer, str(error))
            for request in [*connection.pending.values()]:
                request.error = ConnectionError(str(error))
                request.done.set()

    def on_refusal(self, peer: int, error: DistError) -> DistError:
        """Return the error for a member that cannot be connected to."""
        return error


class RemoteMemory:
    """The target that is member ``rank``'s memory of the window ``number``, by messages."""

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
        self.get(call, 0, 0)  # its reply arrives when all earlier frames are done

    def check(self, call: Call) -> None:
        self._service.connect(call, self._rank)

    def _request(
        self, call: Call | None, kind: int, head: bytes, *values: Any, late: Late | None = None
    ) -> memoryview:
        assert call is not None  # a target by messages has one for all that waits
        return memoryview(self._service.request(call, self._rank, kind, head, *values, late=late))

    def _head(self, offset: int, nbytes: int, *update: int) -> bytes:
        return _HEAD.pack(self._number, offset, nbytes, *(update or (0, 0, 0, 0)))


def _log_error(error: BaseException) -> None:
    _LOGGER.error("a thread of a window raised", exc_info=error)
