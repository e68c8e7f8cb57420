"""Frames between two members over MPI messages.

A frame is one message with the call's header, the payload's size, and the payload if it is short. A
longer payload follows in pieces, without extra copies. MPI preserves the order of messages with one
tag between two processes, as a link requires.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

from transport._calls.call import Call
from transport._calls.header import HEADER_BYTES, CallHeader
from transport._link import Link, OnPiece, Request, waited_for, wrong_frame
from transport._links.communicator import LinkCommunicator
from transport._mpi.library import MpiProcess, wait

_SIZE = struct.Struct("<Q")
_HEAD_BYTES = HEADER_BYTES + _SIZE.size
INLINE_BYTES = 4096
PIECE_BYTES = 1 << 20


class MpiFrame:
    """The sends of one frame. As a context manager, abandons them after an error."""

    def __init__(
        self, process: MpiProcess, call: Call, data: memoryview, dst: int, tag: int
    ) -> None:
        self._process = process
        inline = data.nbytes <= INLINE_BYTES
        head = b"".join((call.packed, _SIZE.pack(data.nbytes), data if inline else b""))
        isend = process.comm.Isend
        self._buffers = (head, data)
        self.requests: list[Any] = [isend([head, process.mpi.BYTE], dst, tag)]
        if not inline:
            for start in range(0, data.nbytes, PIECE_BYTES):
                piece = data[start : start + PIECE_BYTES]
                self.requests.append(isend([piece, process.mpi.BYTE], dst, tag))

    def __enter__(self) -> MpiFrame:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.abandon()

    def abandon(self) -> None:
        """Keep the memory alive until MPI has read it, without waiting."""
        self._process.abandon(self.requests, self._buffers)


class FrameHead:
    """The receive buffer for the first message of a frame."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(_HEAD_BYTES + INLINE_BYTES))

    @property
    def header(self) -> memoryview:
        """The call's header, packed."""
        return self.memory[:HEADER_BYTES]

    @property
    def size(self) -> int:
        """The payload's size in bytes."""
        return _SIZE.unpack_from(self.memory, HEADER_BYTES)[0]

    @property
    def payload(self) -> memoryview:
        """The payload, if it is at most ``INLINE_BYTES`` long."""
        return self.memory[_HEAD_BYTES : _HEAD_BYTES + self.size]


class MpiLink(Link):
    """The link to the member ``peer`` of ``group``, with the MPI tag ``tag``."""

    def __init__(self, group: LinkCommunicator, process: MpiProcess, peer: int, tag: int) -> None:
        self.peer = peer
        self._process = process
        self._rank = group.membership.ranks[peer]
        self._tag = tag
        self._name = group.membership.describe(peer)
        self._check = group.check_open
        self._head = FrameHead()
        self._posted: list[_MpiSend] = []
        self._receives: deque[_MpiReceive] = deque()

    def post_send(self, call: Call, data: memoryview, tag: int = 0) -> _MpiSend:
        del tag  # With a window of 0, all members send and expect frames in the same order.
        self._check()
        frame = MpiFrame(self._process, call, data, self._rank, self._tag)
        sent = _MpiSend(self, call, frame)
        self._posted = [request for request in self._posted if not request.done]
        self._posted.append(sent)
        return sent

    def post_recv(self, call: Call, into: memoryview, tag: int = 0) -> _MpiReceive:
        del tag
        received = _MpiReceive(self, call, into)
        self._receives.append(received)
        return received

    def finish_send(self, call: Call, frame: MpiFrame) -> None:
        """Wait until the frame's memory may be reused."""
        self._wait(call, frame.requests, "to receive data")

    def receive(self, awaited: _MpiReceive, on_piece: OnPiece | None) -> None:
        """Receive the posted frames in order, up to and including ``awaited``."""
        try:
            while not awaited.done:
                first = self._receives[0]
                self._receive(first.call, first.into, on_piece if first is awaited else None)
                first.done = True
                self._receives.popleft()
        finally:
            if not awaited.done:
                self.withdraw()

    def withdraw(self) -> None:
        """Drop all posted frames. Frames that MPI is sending are abandoned."""
        for request in self._posted:
            if not request.done:
                request.frame.abandon()
        self._posted.clear()
        self._receives.clear()

    def _receive(self, call: Call, into: memoryview, on_piece: OnPiece | None) -> None:
        self._check()
        head = self._head
        self._fill(call, head.memory)
        if bytes(head.header) != call.packed or head.size != into.nbytes:
            header = CallHeader.unpack(head.header)
            raise wrong_frame(call, into.nbytes, self.peer, self._name, header, head.size)
        if head.size <= INLINE_BYTES:
            into[:] = head.payload
            if on_piece is not None and head.size:
                on_piece(head.size)
            return
        for start in range(0, into.nbytes, PIECE_BYTES):
            piece = into[start : start + PIECE_BYTES]
            self._fill(call, piece)
            if on_piece is not None:
                on_piece(start + piece.nbytes)

    def _fill(self, call: Call, memory: memoryview) -> None:
        """Receive one message into ``memory``."""
        process = self._process
        request = process.comm.Irecv([memory, process.mpi.BYTE], self._rank, self._tag)
        done = False
        try:
            self._wait(call, [request], "to send data")
            done = True
        finally:
            if not done:  # The receive must not match a later message.
                request.Cancel()
                request.Wait()

    def _wait(self, call: Call, requests: list[Any], what: str) -> None:
        call.waiting_for = self.peer
        if not wait(requests, call.deadline, self._check):
            raise waited_for(call, self.peer, self._name, what)
        call.waiting_for = None


class _MpiSend(Request):
    """A frame that MPI is sending."""

    __slots__ = ("_call", "_link", "frame")

    def __init__(self, link: MpiLink, call: Call, frame: MpiFrame) -> None:
        self._link = link
        self._call = call
        self.frame = frame
        self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if self.done:
            return
        try:
            self._link.finish_send(self._call, self.frame)
            self.done = True
        finally:
            if not self.done:
                self._link.withdraw()


class _MpiReceive(Request):
    """A receive, which gets its frame from MPI in ``wait``."""

    __slots__ = ("_link", "call", "into")

    def __init__(self, link: MpiLink, call: Call, into: memoryview) -> None:
        self._link = link
        self.call = call
        self.into = into
        self.done = False

    def wait(self, on_piece: OnPiece | None = None) -> None:
        if not self.done:
            self._link.receive(self, on_piece)
