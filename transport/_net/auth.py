"""The handshake that begins every connection: both ends prove that they know the job's secret.

The messages have fixed sizes, which bounds the bytes of an unauthenticated connection::

    1. initiator -> acceptor   magic, version, has-secret flag, 32 fresh random bytes
    2. acceptor -> initiator   the same fields, with its own random bytes
    3. initiator -> acceptor   HMAC-SHA256(secret, "initiator" + both hellos)
    4. acceptor -> initiator   HMAC-SHA256(secret, "acceptor" + both hellos)

The proofs differ by role, so neither can be reflected. They are bound to both ends' fresh bytes, so
neither can be replayed. The acceptor sends nothing before it has received the magic, and no proof
before the initiator's. The handshake authenticates, but does not encrypt: an attacker on the path
can alter later packets. Inside TLS (``transport._net.tls``) the proofs also cover the acceptor's
certificate.

The handshake also detects that only one end uses TLS. An acceptor with TLS answers a plain hello
with its own, whose flags demand TLS. One without TLS answers the beginning of TLS with an alert.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket

from transport import _environment as environment
from transport._errors import AuthenticationError
from transport._net.reach import is_out_of_reach
from transport._net.secret_file import SECRET_BYTES
from transport._net.sockets import recv_exact, send_all
from transport._net.tls_choice import is_tls
from transport._waiting.deadline import Deadline

HANDSHAKE_SECONDS = 20.0
"""The time that an acceptor grants a connection to authenticate."""

_MAGIC = b"meshlib\x00"
_VERSION = 1
_HAS_SECRET, _WANTS_TLS = 1, 2
_NONCE_BYTES = 32
_HELLO_BYTES = len(_MAGIC) + 2 + _NONCE_BYTES
_PROOF_BYTES = hashlib.sha256().digest_size
MAX_UNPROVEN_BYTES = _HELLO_BYTES + _PROOF_BYTES
"""The most bytes that are read from a connection before it has authenticated."""

TLS_BEGINS = b"\x16"
"""The first byte of every TLS connection, which no other known protocol sends first."""
_NO_TLS = b"\x15\x03\x03\x00\x02\x02\x46"  # an alert: fatal, protocol_version


class HandshakeInterruptedError(AuthenticationError):
    """The other end became unreachable, or hung up before its hello, because it is closing or too
    busy. Try again.
    """


class Handshake:
    """One end of a handshake as a state machine without input or output.

    Send ``start()``. Then pass each message of exactly ``wanted`` bytes to ``receive`` and send
    the answer, until ``wanted`` is 0. If ``refusal`` is set, the handshake has failed: send the
    last answer, which contains the reason, then hang up.

    With ``tls``, the other end must require TLS too, and the handshake must run inside it. Then
    ``binding`` is equal on both ends, unless a man in the middle has two TLS connections.
    """

    def __init__(
        self,
        secret: bytes | None,
        *,
        initiator: bool,
        tls: bool = False,
        binding: bytes | None = None,
    ) -> None:
        self._key = secret or b""
        self._initiator = initiator
        self._wants_tls = tls
        self._binding = binding
        self._hello = b"".join(
            (
                _MAGIC,
                bytes((_VERSION, (_HAS_SECRET if secret else 0) | (_WANTS_TLS if tls else 0))),
                os.urandom(_NONCE_BYTES),
            )
        )
        self._their_hello = b""
        self.wanted = _HELLO_BYTES
        self.refusal: str | None = None

    @property
    def answered(self) -> bool:
        """True if the other end has sent its hello."""
        return bool(self._their_hello)

    def start(self) -> bytes:
        """Return the first message of this end."""
        return self._hello if self._initiator else b""

    def receive(self, message: bytes) -> bytes:
        """Process the next message, of ``wanted`` bytes; return the answer, which may be empty."""
        if self._their_hello:
            return self._receive_proof(message)
        return self._receive_hello(message)

    def explain_end(self, received: int) -> str:
        """Return the error for a peer that hung up after ``received`` more bytes."""
        if self._initiator and self._their_hello:
            return "the other end refused our proof: it has another secret"
        if not self._their_hello and received == 0:
            return "the other end hung up before its hello"
        return "the other end hung up during the handshake"

    def _receive_hello(self, message: bytes) -> bytes:
        size = len(_MAGIC)
        if message[:1] == TLS_BEGINS and not self._wants_tls:
            return self._refuse(
                f"the other end speaks TLS and this end does not {environment.TLS_EVERYWHERE}",
                b"" if self._initiator else _NO_TLS,
            )
        if message[:size] != _MAGIC:
            return self._refuse("the other end does not speak this protocol (wrong first bytes)")
        answer = b"" if self._initiator else self._hello
        version, flags = message[size], message[size + 1]
        has_secret, wants_tls = bool(flags & _HAS_SECRET), bool(flags & _WANTS_TLS)
        if version != _VERSION:
            return self._refuse(
                f"the other end speaks protocol version {version}, this end {_VERSION}", answer
            )
        if wants_tls != self._wants_tls or (self._wants_tls and self._binding is None):
            holder, other = ("the other", "this") if wants_tls else ("this", "the other")
            return self._refuse(
                f"{holder} end speaks TLS and {other} end does not {environment.TLS_EVERYWHERE}",
                answer,
            )
        if has_secret != bool(self._key):
            holder, other = ("the other", "this") if has_secret else ("this", "the other")
            return self._refuse(
                f"{holder} end has a secret and {other} end has none"
                f" ({environment.SECRET} must be the same in all processes of a job)",
                answer,
            )
        self._their_hello = message
        self.wanted = _PROOF_BYTES
        return self._proof(initiator=True) if self._initiator else answer

    def _receive_proof(self, message: bytes) -> bytes:
        if not hmac.compare_digest(message, self._proof(initiator=not self._initiator)):
            return self._refuse("the other end has another secret (wrong proof)")
        self.wanted = 0
        return b"" if self._initiator else self._proof(initiator=False)

    def _proof(self, *, initiator: bool) -> bytes:
        hellos = (self._hello, self._their_hello)
        first, second = hellos if self._initiator else reversed(hellos)
        role = b"initiator" if initiator else b"acceptor"
        return hmac.digest(self._key, role + first + second + (self._binding or b""), "sha256")

    def _refuse(self, reason: str, answer: bytes = b"") -> bytes:
        self.refusal = reason
        self.wanted = 0
        return answer


def authenticate(
    sock: socket.socket,
    secret: bytes | None,
    deadline: Deadline,
    *,
    initiator: bool,
    behind: bytes = b"",
) -> None:
    """Run the handshake on a connected socket, blocking until the deadline at most.

    Exactly one end is the ``initiator``: the one that connected. Without a ``secret`` on both
    ends, only the protocol is checked. The initiator sends ``behind`` together with its proof,
    before the other end has proved that it knows the secret. On a ``TlsSocket``, TLS's handshake
    runs first. The socket stays open, in any timeout mode. Raises AuthenticationError with the
    reason.
    """
    handshake = Handshake(secret, initiator=initiator)
    try:
        if is_tls(sock):
            sock.handshake(deadline)
            handshake = Handshake(secret, initiator=initiator, tls=True, binding=sock.binding)
        if initiator:
            send_all(sock, handshake.start(), deadline)
        while handshake.wanted:
            answer = handshake.receive(recv_exact(sock, handshake.wanted, deadline))
            if answer:
                proves = initiator and not handshake.refusal
                send_all(sock, answer + behind if proves else answer, deadline)
    except OSError as error:
        if isinstance(error, TimeoutError) and deadline.expired:
            raise AuthenticationError(
                f"handshake with {_peer(sock)} failed: the other end sent nothing"
                f" for {deadline.seconds:g} s",
                refused=False,
            ) from error
        if is_out_of_reach(error):
            raise HandshakeInterruptedError(
                f"handshake with {_peer(sock)} failed: the other end is out of reach ({error})",
                refused=False,
            ) from error
        if is_tls(sock) and (reason := sock.explain(error)) is not None:
            raise AuthenticationError(f"handshake with {_peer(sock)} failed: {reason}") from error
        unanswered = initiator and not handshake.answered
        kind = HandshakeInterruptedError if unanswered else AuthenticationError
        raise kind(
            f"handshake with {_peer(sock)} failed: {handshake.explain_end(0)} ({error})",
            refused=handshake.answered,
        ) from error
    if handshake.refusal:
        raise AuthenticationError(f"handshake with {_peer(sock)} failed: {handshake.refusal}")


def _peer(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "a lost connection"
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) and address else "a socket"


def new_secret() -> bytes:
    """Return a fresh secret for a job."""
    return os.urandom(SECRET_BYTES)
