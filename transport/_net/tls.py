"""TLS for the connections of a job, with the user's certificates.

Both ends present a certificate of the same authority. Inside TLS they prove that they know the
job's secret, in a handshake that is bound to the acceptor's certificate. So a man in the middle
with a certificate of the same authority cannot forward the proofs. Names and addresses in
certificates are not checked, because ranks find their addresses at run time.

A ``TlsSocket`` replaces the plain socket in all of this package.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transport import _environment as environment
from transport._net.fork import close_in_forked_children
from transport._net.reach import is_out_of_reach
from transport._waiting.deadline import Deadline

_RECORD_BYTES = 16 << 10
_WRONG_TIME = frozenset((9, 10))  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_SOCKET, _ERROR = int(socket.SOL_SOCKET), int(socket.SO_ERROR)
# Before 3.13, Python does not report why a system call of OpenSSL's failed, so a connection that
# the kernel has given up looks like one that the peer has closed.
_FORGETS_ERRORS = sys.version_info < (3, 13)
_TIMEVAL = struct.Struct("@ll")
_Result = TypeVar("_Result")


class Tls:
    """The certificate of this process, and the authority whose certificates it trusts.

    ``cert`` and ``ca`` are files with certificates. ``key`` is a file with the private key of the
    first certificate in ``cert``, without a password. All are in PEM. Raises ValueError naming an
    unusable file.
    """

    def __init__(self, cert: str | Path, key: str | Path, ca: str | Path) -> None:
        self._files = Path(cert), Path(key), Path(ca)
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER)
        # The client would not read tickets, and unread bytes turn its orderly close into a reset.
        self._server.num_tickets = 0
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        text = self._files[0].read_text()
        first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER)] + ssl.PEM_FOOTER
        self._binding = _digest(ssl.PEM_cert_to_DER_cert(first))

    def client(self, sock: socket.socket) -> TlsSocket:
        """Return the TLS end of ``sock``, which has connected. The handshake has not begun."""
        return self._wrap(self._client, sock)

    def server(self, sock: socket.socket) -> TlsSocket:
        """Return the TLS end of ``sock``, which was accepted. The handshake has not begun."""
        wrapped = self._wrap(self._server, sock)
        wrapped.binding = self._binding
        return wrapped

    @staticmethod
    def _wrap(context: ssl.SSLContext, sock: socket.socket) -> TlsSocket:
        server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        try:
            wrapped = context.wrap_socket(sock, server, do_handshake_on_connect=False)
        except Exception:
            sock.close()
            raise
        assert isinstance(wrapped, TlsSocket)
        close_in_forked_children(wrapped)
        return wrapped

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.sslsocket_class = TlsSocket
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        cert, key, ca = self._files
        for name, path in zip(environment.TLS, self._files, strict=True):
            try:
                path.read_bytes()
            except OSError as error:
                raise ValueError(f"{name}: cannot read {path}: {error.strerror}") from error
        try:
            context.load_cert_chain(cert, key, password="")  # OpenSSL would prompt for one
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"{environment.TLS_CERT} {cert} and {environment.TLS_KEY} {key}: expected a"
                f" certificate and its private key, without a password, in PEM ({error})"
            ) from error
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"{environment.TLS_CA} {ca}: expected certificates in PEM ({error})"
            ) from error
        return context


class TlsSocket(ssl.SSLSocket):
    """A TLS connection that behaves like the plain stream socket below it.

    It differs from Python's ``SSLSocket`` in four ways. One thread may receive while another
    sends. Flags (``MSG_DONTWAIT``) and the kernel's timeouts (``SO_RCVTIMEO``) work as on plain
    sockets. ``sendmsg`` works, and ``shutdown`` wakes waiting threads. A connection that ends
    without TLS's close_notify is a normal end of the stream, because the frames have lengths.

    OpenSSL must send the rest of a record before other bytes. So a send that raised
    BlockingIOError has to be repeated with the same bytes: with others, it raises
    ConnectionAbortedError.

    OpenSSL reads one record at a time, so the descriptor is ready when the next record has arrived.
    But it is not ready for the rest of a partly received record: call ``recv`` before ``poll``.
    """

    binding: bytes | None = None
    """A digest of the acceptor's certificate; at the client, None before ``try_handshake``."""

    _sslobj: object | None  # Python's own
    _ssl_lock: threading.Lock
    _begun: bytes | None
    _given_up: int = 0
    _seconds: float | None = None
    _receive_seconds: float | None = None
    _send_seconds: float | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> TlsSocket:
        self = super().__new__(cls, *args, **kwargs)
        # OpenSSL allows one thread at a time. Its system calls here never block.
        self._ssl_lock = threading.Lock()
        self._begun = None
        return self

    # The handshake.

    def try_handshake(self) -> int:
        """Continue the handshake: return 0 when it is done, else the events of ``select.poll`` to
        wait for. Raises OSError if it failed.
        """
        try:
            with self._ssl_lock:
                self.do_handshake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLEOFError:
            raise ConnectionResetError(errno.ECONNRESET, "it hung up") from None
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                raise
            # The connection was lost before it was wrapped.
            raise ConnectionResetError(errno.ECONNRESET, "it hung up") from None
        if self.binding is None:
            self.binding = _digest(self.getpeercert(binary_form=True) or b"")
        return 0

    def handshake(self, deadline: Deadline) -> None:
        """Complete the handshake. Raises TimeoutError past the deadline, OSError if it failed."""
        while events := self.try_handshake():
            if not _await(self, events, deadline.at):
                raise TimeoutError(errno.ETIMEDOUT, f"no TLS within {deadline.seconds:g} s")

    def explain(self, error: OSError) -> str | None:
        """Return an explanation of a handshake's ``error``; None if it is not a TLS error."""
        if not isinstance(error, ssl.SSLError):
            return None
        reason = error.reason or ""
        if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _WRONG_TIME:
            return (
                f"the other end's certificate is not valid at this machine's time"
                f" ({error.verify_message})"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"{environment.TLS_CA} did not sign its certificate ({error.verify_message})"
        if "ALERT" not in reason or reason == "TLSV1_ALERT_PROTOCOL_VERSION":
            text = "this end speaks TLS and the other end does not"
            return f"{text} {environment.TLS_EVERYWHERE} ({error})"
        return f"the other end refused our certificate ({error})"

    # Timeouts: the descriptor is always non-blocking.

    def settimeout(self, value: float | None) -> None:
        socket.socket.settimeout(self, 0.0)
        self._seconds = value

    def setblocking(self, flag: bool) -> None:
        self.settimeout(None if flag else 0.0)

    def gettimeout(self) -> float | None:
        return self._seconds

    def setsockopt(self, level: int, optname: int, *value: Any) -> None:
        if level == socket.SOL_SOCKET and optname in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, micros = _TIMEVAL.unpack(value[0])
            limit = seconds + micros / 1e6 or None
            if optname == socket.SO_RCVTIMEO:
                self._receive_seconds = limit
            else:
                self._send_seconds = limit
        else:
            super().setsockopt(level, optname, *value)

    # Moving bytes.

    def pending(self) -> int:
        """Return the number of unread bytes of a partly read record."""
        with self._ssl_lock:
            return super().pending() if self.fileno() >= 0 else 0

    def recv(self, buflen: int = _RECORD_BYTES, flags: int = 0) -> bytes:
        size = min(buflen, _RECORD_BYTES)
        try:
            return self._retry(partial(super().recv, size), flags, self._receive_seconds)
        except BrokenPipeError:  # OpenSSL answers the peer's end, after this end's shutdown
            return b""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        size = min(nbytes or memoryview(buffer).nbytes, _RECORD_BYTES)
        attempt = partial(super().recv_into, buffer, size)
        try:
            return self._retry(attempt, flags, self._receive_seconds)
        except BrokenPipeError:
            return 0

    def send(self, data: Any, flags: int = 0) -> int:
        piece = memoryview(data)[:_RECORD_BYTES]
        return self._retry(partial(self._write, piece), flags, self._send_seconds)

    def sendmsg(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, buffers: Iterable[Any], ancdata: Iterable[Any] = (), flags: int = 0
    ) -> int:
        room, pieces = _RECORD_BYTES, list[memoryview]()
        for buffer in buffers:
            pieces.append(memoryview(buffer)[:room])
            room -= len(pieces[-1])
        return self.send(b"".join(pieces), flags)

    def sendall(self, data: Any, flags: int = 0) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest, flags) :]

    def _write(self, piece: memoryview) -> int:
        if self._begun is not None and self._begun != bytes(piece[: len(self._begun)]):
            raise ConnectionAbortedError(
                errno.ECONNABORTED, "an earlier call stopped in the middle of a record"
            )
        try:
            sent = super().send(self._begun or piece)
        except ssl.SSLWantWriteError:
            self._begun = self._begun or bytes(piece)
            raise
        self._begun = None
        return sent

    def _retry(self, attempt: Callable[[], _Result], flags: int, limit: float | None) -> _Result:
        """Return the result of ``attempt``, waiting for either direction if necessary.

        Raises the errors of a plain socket: TimeoutError past the limit of ``settimeout``, and
        BlockingIOError past the kernel's limit or without blocking.
        """
        if self._sslobj is None:
            # The socket was closed, or lost before it was wrapped. Python's methods would now
            # receive and send plain bytes.
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        until: float | None = None
        while True:
            try:
                with self._ssl_lock:
                    if _FORGETS_ERRORS:
                        number = self.getsockopt(_SOCKET, _ERROR)
                        if number and is_out_of_reach(OSError(number, "")):
                            self._given_up = number
                    result = attempt()
                if self._given_up and not result:
                    raise self._lost()
                return result
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except ssl.SSLEOFError:  # what OpenSSL makes of EPIPE and ECONNRESET in a send
                raise self._lost() from None
            except ValueError as error:  # another thread closed the socket
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)) from error
            if flags & socket.MSG_DONTWAIT or self._seconds == 0:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            seconds = limit if self._seconds is None else self._seconds
            if until is None and seconds is not None:
                until = time.monotonic() + seconds
            if not _await(self, events, until):
                if self._seconds is None:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                raise TimeoutError("timed out")

    def _lost(self) -> OSError:
        if self._given_up:
            return OSError(self._given_up, os.strerror(self._given_up))
        return ConnectionResetError(errno.ECONNRESET, "the other end hung up")

    def shutdown(self, how: int) -> None:
        """Shut down the connection below. TLS stays on: later bytes must not be read as plain."""
        socket.socket.shutdown(self, how)


def _await(sock: socket.socket, events: int, until: float | None) -> bool:
    """Wait for the events; return False if none has occurred by ``until``."""
    poller = select.poll()
    poller.register(sock, events)
    while True:
        left = None if until is None else until - time.monotonic()
        if poller.poll(None if left is None else max(0, min(left, 86400.0)) * 1000):
            return True
        if left is not None and left <= 0:
            return False


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()
