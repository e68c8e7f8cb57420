"""What reads bytes or text from outside, as functions of arbitrary bytes that fail on a bug.

Each accepts its input or refuses it with the errors that it documents; anything else, a hang or
memory for what has not arrived, is a finding. ``test_fuzz.py`` runs them briefly with Hypothesis,
``with_atheris.py`` for as long as one likes, guided by coverage.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from meshlib._mesh.config import MeshConfig
from meshlib._trace import dump
from transport._calls.call import Call
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._channel.frames import FrameError, FrameReader, pack
from transport._errors import (
    DistNetworkError,
    DistStoreError,
    HeaderMismatchError,
    PeerLostError,
)
from transport._net.auth import MAX_UNPROVEN_BYTES, Handshake
from transport._rendezvous.announcements import Announcement
from transport._shm.meeting.peer_connection import Packet
from transport._store.commands import Commands
from transport._store.fields import WireError, unpack_fields
from transport._store.tcp.wire import REPLY, REQUEST, Frames, Status
from transport._tcp.frame import PREFIX_BYTES, SMALL_BYTES, parse_prefix
from transport._tcp.link import TcpLink
from transport._tcp.meeting.address import Address
from transport._tcp.meeting.hello import HELLO_BYTES, Hello
from transport._waiting.deadline import Deadline


def handshake(data: bytes) -> None:
    """No stranger passes, and little is read of it."""
    choice, stream = data[0] if data else 0, data[1:]
    tls = bool(choice & 2)
    machine = Handshake(
        b"secret" if choice & 1 else None,
        initiator=bool(choice & 4),
        tls=tls,
        binding=b"certificate" if tls and choice & 8 else None,
    )
    if choice & 16:  # past the magic and the version
        stream = Handshake(b"secret", initiator=True, tls=tls).start()[:10] + stream
    machine.start()
    read = 0
    while machine.wanted and len(stream) - read >= machine.wanted:
        message = stream[read : read + machine.wanted]
        read += len(message)
        assert len(machine.receive(message)) <= MAX_UNPROVEN_BYTES
    assert machine.wanted or machine.refusal or not choice & 1
    assert read <= MAX_UNPROVEN_BYTES


class _Stream:
    """A socket from which ``data`` comes in pieces of ``step`` bytes."""

    def __init__(self, data: bytes, step: int, sock: socket.socket | None = None) -> None:
        self._sock = sock
        self._data = data
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def getsockname(self) -> tuple[str]:
        return ("here",)

    def getpeername(self) -> tuple[str]:
        return ("there",)

    def recv_into(self, into: memoryview, size: int = 0, _flags: int = 0) -> int:
        piece = self._data[: min(self._step, size or len(into), len(into))]
        self._data = self._data[len(piece) :]
        into[: len(piece)] = piece
        return len(piece)


_CALL = Call(CallHeader(1, 4, NO_ROOT, Kind.ALL_REDUCE, 11, 1), Deadline.after(1.0))


def frame(data: bytes) -> None:
    """A link takes the frame that it waits for, and nothing of any other."""
    step, size = (
        (data[0] % 97 + 1, (0, 3, 40, SMALL_BYTES + 1)[data[1] % 4]) if data[1:] else (1, 0)
    )
    stream = data[2:]
    if data[:1] > b"\x80":
        stream = _CALL.packed + stream
    into = memoryview(bytearray(size))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = TcpLink((cast(socket.socket, _Stream(stream, step, theirs)),), 0, "rank 0")
        request = link.post_recv(_CALL, into)
        try:
            while not request.done:
                if not link.pull():
                    link.check_awaited(request)
        except (PeerLostError, HeaderMismatchError):
            if request.received == 0:
                assert not any(into)
            return
        finally:
            link.close()
    found = parse_prefix(stream)
    assert (found.header, found.size) == (_CALL.header, size)
    assert into == stream[PREFIX_BYTES : PREFIX_BYTES + size]


def prefix(data: bytes) -> None:
    """Any prefix is a header that can be shown: messages are made of what arrived."""
    header = parse_prefix(data.ljust(PREFIX_BYTES, b"\0")).header
    assert str(header)
    assert CallHeader.unpack(header.pack()) == header


def hello(data: bytes) -> None:
    """Bytes after the handshake are passed on unparsed."""
    data = data.ljust(HELLO_BYTES, b"\0")[:HELLO_BYTES]
    assert Hello.unpack(data).pack() == data


def requests(data: bytes) -> None:
    """A store's server answers a client's frames or drops the client."""
    frames, commands = Frames(REQUEST), Commands()
    half = len(data) // 2
    # What the server drops a client for, or tells it.
    with suppress(WireError, TypeError, ValueError, DistStoreError):
        for piece in (data[:half], data[half:]):
            for found in frames.feed(piece):
                op = REQUEST.unpack_from(found)[2]
                fields = unpack_fields(found, REQUEST.size, len(found))
                if commands.answer(op, fields) is None:
                    commands.waiter(op, fields, lambda _: None)
    assert len(frames._rest) <= len(data)


def replies(data: bytes) -> None:
    """A store's client takes a server's frames or gives the connection up."""
    with suppress(WireError, ValueError):
        for found in Frames(REPLY).feed(data):
            Status(REPLY.unpack_from(found)[2])
            unpack_fields(found, REPLY.size, len(found))


def flight_record(data: bytes) -> None:
    """A flight record can be read and looked at, or is none."""
    with suppress(ValueError):
        found = dump.RankDump.unpack(data)
        sorted([found.rank, 0])
        _ = [call.kind for call in found.calls]


def fields_of_a_flight_record(data: bytes) -> None:
    """The same, with a record that is right up to one value."""
    call: dict[str, Any] = {
        **dict.fromkeys(("group", "site", "label"), "text"),
        **dict.fromkeys(("nbytes", "peer"), 1),
        **dict.fromkeys(("issued", "started", "ended"), 1.0),
        "blocking": True,
        "header": [1] * len(CallHeader._fields),
        "error": None,
        "waiting_for": None,
    }
    record: dict[str, Any] = {
        **{
            "format": dump.FORMAT,
            "rank": 0,
            "size": 2,
            "host": "h",
            "pid": 1,
            "written": 1.0,
            "error": None,
        },
        **{"groups": {"g": ["", [0, 1]]}, "calls": [call]},
    }
    where = data[0] if data else 0
    try:
        value = json.loads(data[1:])
    except (ValueError, RecursionError):
        return
    target = call if where & 1 else record
    target[list(target)[(where >> 1) % len(target)]] = value
    flight_record(json.dumps(record).encode())


def mesh(data: bytes) -> None:
    """A mesh's text is a mesh, which prints as itself, or a ValueError."""
    with suppress(ValueError):
        config = MeshConfig.from_string(data.decode(errors="replace"))
        assert config.shape
        assert config.names


def address(data: bytes) -> None:
    """A store's text about a rank is an address or a DistNetworkError."""
    with suppress(DistNetworkError):
        found = Address.decode(data)
        assert isinstance(found.host, str)
        assert 0 < found.port <= 65535


def announcement(data: bytes) -> None:
    """A datagram is a announcement with the job's proof, or nothing."""
    assert Announcement.unpack(data, b"secret") is None
    Announcement.unpack(data, None)


def packet(data: bytes) -> None:
    """A packet of the shared-memory endpoints is a message or a ValueError."""
    with suppress(ValueError):
        Packet.unpack(data)


def remote_calls(data: bytes) -> None:
    """A stream is frames of remote calls, or ends in a FrameError; cut in any way, the same."""
    step, stream = (data[0] * 300 + 1, data[1:]) if data else (1, b"")
    found: list[tuple[int, int, int, bytes, list[bytes | None]]] = []
    reader, sock = FrameReader(), cast(socket.socket, _Stream(stream, step))
    with suppress(ConnectionResetError, FrameError):
        while True:
            for frame in reader.receive(sock):
                memories = [None if b.memory is None else bytes(b.memory) for b in frame.buffers]
                found.append((frame.kind, frame.flags, frame.number, bytes(frame.data), memories))
    again = b""
    for kind, flags, call, body, memories in found:
        if None in memories:
            return  # what lies in the sender's memory has an address, which is not kept
        views = [memoryview(memory or b"") for memory in memories]
        again += b"".join(pack(kind, call, body, views, [0] * len(views), flags))
    assert stream.startswith(again)


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (
        *(handshake, frame, prefix, hello, requests, replies, flight_record),
        *(fields_of_a_flight_record, mesh, address, announcement, packet, remote_calls),
    )
}
