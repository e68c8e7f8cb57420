"""A connection between the endpoints of two ranks: packets that may carry a descriptor."""

from __future__ import annotations

import array
import contextlib
import enum
import os
import socket
import struct
from dataclasses import dataclass

from transport._errors import AuthenticationError
from transport._net.auth import Handshake
from transport._net.sockets import close_in_forked_children

_HEAD = struct.Struct("<BxxxIQH")
_MAX_PACKET = 4096
_CREDENTIALS = struct.Struct("3i")


class Operation(enum.IntEnum):
    """The purpose of a packet."""

    REQUEST = 1
    GIVE = 2
    REFUSE = 3
    GONE = 4
    KICK = 5


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet. ``rank`` is the sender's in ``group``; ``text`` names the memory or a reason."""

    operation: Operation
    group: str
    number: int = 0
    rank: int = 0
    text: str = ""

    def pack(self) -> bytes:
        """Return the packet's bytes."""
        group = self.group.encode()
        head = _HEAD.pack(self.operation, self.rank, self.number, len(group))
        return (head + group + self.text.encode())[:_MAX_PACKET]

    @classmethod
    def unpack(cls, data: bytes) -> Packet:
        """Return the packet in ``data``; raise ValueError if it is malformed."""
        try:
            operation, rank, number, size = _HEAD.unpack_from(data)
        except struct.error as error:
            raise ValueError(str(error)) from error
        rest = data[_HEAD.size :]
        return cls(Operation(operation), rest[:size].decode(), number, rank, rest[size:].decode())


class PeerConnection:
    """One end of a connection, on a non-blocking SEQPACKET socket, which preserves packets.

    ``users`` are the common groups of both ends, with the peer's rank in each. A thread holds the
    endpoint's lock while it uses ``users`` or sends.
    """

    def __init__(self, sock: socket.socket, handshake: Handshake | None) -> None:
        sock.setblocking(False)
        close_in_forked_children(sock)
        self.sock = sock
        self.handshake = handshake
        self.users: dict[str, int] = {}
        self._address: bytes | None = None
        self._waiting: list[Packet] = []

    @classmethod
    def to(cls, address: bytes, secret: bytes | None) -> PeerConnection:
        """Return a connection to the endpoint at ``address``, which may have to ``begin`` again.

        Raises OSError if no process listens.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection = cls(sock, Handshake(secret, initiator=True))
            connection._address = address
            connection.begin()
        except Exception:
            sock.close()
            raise
        return connection

    def begin(self) -> bool:
        """Connect, unless connected; return False if the peer's listen queue is full.

        Raises OSError if no process listens, PermissionError if another user's does.
        """
        if self._address is None or self.handshake is None:
            return True
        try:
            self.sock.connect(self._address)
        except BlockingIOError:
            return False
        if not same_user(self.sock):
            raise PermissionError("it belongs to another user")
        self._address = None
        self.sock.send(self.handshake.start())
        return True

    def send(self, message: Packet, fd: int = -1, may_drop: bool = False) -> None:
        """Send a packet, now or when the handshake is done. Never blocks.

        If the kernel's buffer is full, the packet is dropped (``may_drop``) or the connection cut.
        Errors appear when the loop reads.
        """
        if self.handshake is not None:
            self._waiting.append(message)
            return
        carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self.sock.sendmsg([message.pack()], carried if fd >= 0 else [])
        except BlockingIOError:
            if not may_drop:
                self.cut()
        except OSError:
            self.cut()

    def cut(self) -> None:
        """Shut the connection down for both ends; the loop notices."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def shake_hands(self) -> bool:
        """Continue the handshake; return False if it was done already.

        Raises BlockingIOError if the peer's part has not arrived, ConnectionError if the peer hung
        up at once, AuthenticationError if one end could not prove that it knows the secret.
        """
        handshake = self.handshake
        if handshake is None:
            return False
        data = self.sock.recv(handshake.wanted)
        if not data and not handshake.answered:
            raise ConnectionResetError("it hung up before the handshake")
        if len(data) != handshake.wanted:
            raise AuthenticationError(f"handshake failed: {handshake.explain_end(len(data))}")
        answer = handshake.receive(data)
        if handshake.refusal:
            raise AuthenticationError(f"handshake failed: {handshake.refusal}")
        if answer:
            self.sock.send(answer)
        if not handshake.wanted:
            self.handshake = None
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self.send(message)
        return True

    def receive(self) -> tuple[Packet, int]:
        """Return the next packet and its descriptor (-1: none).

        Raises BlockingIOError if no packet has arrived, ValueError at the end or if malformed.
        """
        data, fds, _, _ = socket.recv_fds(self.sock, _MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ValueError("the peer hung up")
        fd = fds[0] if fds else -1
        try:
            return Packet.unpack(data), fd
        except ValueError:
            if fd >= 0:
                os.close(fd)
            raise


def same_user(sock: socket.socket) -> bool:
    """True if the process at the other end belongs to this process's user, or to root."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(data)
    return user in (os.geteuid(), 0)
