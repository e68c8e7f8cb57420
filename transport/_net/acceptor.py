"""Accepts connections in a selector loop, and delivers those that pass the handshake.

Unauthenticated connections cost little. Each gets ``HANDSHAKE_SECONDS`` and a bounded number of
bytes. The acceptor holds a bounded number of them and drops the oldest for newer ones, silent ones
first. No connection waits for another one's handshake.
"""

from __future__ import annotations

import errno
import logging
import resource
import select
import selectors
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from transport._net.auth import HANDSHAKE_SECONDS, TLS_BEGINS, Handshake
from transport._net.sockets import tune
from transport._net.tls_choice import is_tls

if TYPE_CHECKING:
    from transport._net.tls import Tls

_LOGGER = logging.getLogger("meshlib.transport")
_ACCEPTS_A_TURN = 32
_MAX_PENDING = 1024
_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_SECONDS = 0.1
# Bytes read and discarded from a peer that was sent the reason why TLS failed.
_MAX_DISCARDED = 1 << 16


@dataclass(slots=True, eq=False)
class _Pending:
    """A connection that has not authenticated yet."""

    sock: socket.socket
    expires: float
    handshake: Handshake | None
    """None before TLS's own handshake."""
    received: bytes = b""
    discarded: int | None = None


class Acceptor:
    """Serves a listening socket in the caller's selector loop. One thread only.

    ``deliver`` is called with each authenticated connection: non-blocking, tuned, and not
    registered; with ``tls``, a ``TlsSocket``. The loop (as ``EventLoop`` does) must call a ready
    key's ``data(events)``, pass ``seconds_to_wait()`` to ``select`` and call ``expire()`` once per
    turn::

        for key, events in selector.select(acceptor.seconds_to_wait()):
            key.data(events)
        acceptor.expire()

    The acceptor owns the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes | None,
        selector: selectors.BaseSelector,
        deliver: Callable[[socket.socket], None],
        tls: Tls | None = None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._tls = tls
        self._selector = selector
        self._deliver = deliver
        # Oldest first, which is also the order of expiry. Silent connections are dropped before
        # those that have sent a hello.
        self._silent: OrderedDict[_Pending, None] = OrderedDict()
        self._greeted: OrderedDict[_Pending, None] = OrderedDict()
        self._resume_at: float | None = None
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_pending = max(8, min(_MAX_PENDING, files // 4))
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._on_listener)

    @property
    def pending(self) -> int:
        """The number of connections that have not authenticated yet."""
        return len(self._silent) + len(self._greeted)

    def seconds_to_wait(self) -> float | None:
        """Return the seconds until ``expire`` has work, or None."""
        moments = [
            next(iter(pending)).expires for pending in (self._silent, self._greeted) if pending
        ]
        if self._resume_at is not None:
            moments.append(self._resume_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def expire(self) -> None:
        """Drop expired connections; accept again after a shortage of descriptors."""
        if not self._silent and not self._greeted and self._resume_at is None:
            return
        now = time.monotonic()
        for pending in (self._silent, self._greeted):
            while pending and next(iter(pending)).expires <= now:
                self._drop(next(iter(pending)), "it did not authenticate in time")
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_listener)

    def close(self) -> None:
        """Stop listening and drop all pending connections. Delivered connections stay open."""
        if self._resume_at is None and self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
        self._listener.close()
        for pending in [*self._silent, *self._greeted]:
            self._drop(pending, "the server is closing")

    def _on_listener(self, _events: int) -> None:
        # A few per turn, so that a flood does not block pending handshakes.
        for _ in range(_ACCEPTS_A_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    continue  # it hung up while it was queued
                if self.pending:
                    self._drop_oldest("too few file descriptors are left")
                    continue
                _LOGGER.warning("cannot accept connections for a moment: %s", error)
                self._selector.unregister(self._listener)
                self._resume_at = time.monotonic() + _PAUSE_SECONDS
                return
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        try:
            tune(sock)
            sock.setblocking(False)
        except OSError:
            sock.close()
            return
        if self.pending >= self._max_pending:
            self._drop_oldest("too many connections are pending")
        handshake = Handshake(self._secret, initiator=False) if self._tls is None else None
        pending = _Pending(sock, time.monotonic() + HANDSHAKE_SECONDS, handshake)
        self._silent[pending] = None
        self._register(pending)

    def _register(self, pending: _Pending) -> None:
        on_pending = partial(self._on_pending, pending)
        self._selector.register(pending.sock, selectors.EVENT_READ, on_pending)

    def _on_pending(self, pending: _Pending, _events: int) -> None:
        try:
            if pending.discarded is not None:
                self._discard(pending, pending.discarded)
                return
            handshake = pending.handshake or self._shake_tls(pending)
            if handshake is not None:
                self._shake(pending, handshake)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(pending, str(error))
        except Exception as error:
            _LOGGER.exception("a handshake failed")
            self._drop(pending, str(error))

    def _shake_tls(self, pending: _Pending) -> Handshake | None:
        """Continue TLS's handshake; return the job's handshake once it is done."""
        assert self._tls is not None
        if is_tls(pending.sock):
            sock = pending.sock
        elif pending.sock.recv(1, socket.MSG_PEEK) != TLS_BEGINS:
            # The peer does not use TLS: refuse it in the plain protocol.
            pending.handshake = Handshake(self._secret, initiator=False, tls=True)
            return pending.handshake
        else:
            plain = pending.sock
            sock = pending.sock = self._tls.server(plain)
            self._selector.unregister(plain)
            self._register(pending)
        try:
            awaited = sock.try_handshake()
        except OSError as error:
            if sock.explain(error) is None:
                raise
            self._dismiss(pending, f"TLS failed: {error}")
            return None
        if awaited:
            if awaited & select.POLLOUT:
                self._drop(pending, "it does not read the answer")
            return None
        binding = sock.binding
        pending.handshake = Handshake(self._secret, initiator=False, tls=True, binding=binding)
        return pending.handshake

    def _shake(self, pending: _Pending, handshake: Handshake) -> None:
        while handshake.wanted:
            # No more than the message: later bytes are for the connection's user.
            data = pending.sock.recv(handshake.wanted - len(pending.received))
            if not data:
                unasked = pending in self._silent and not pending.received
                reason = handshake.explain_end(len(pending.received))
                self._drop(pending, reason, logging.DEBUG if unasked else logging.INFO)
                return
            pending.received += data
            if len(pending.received) < handshake.wanted:
                continue
            answer = handshake.receive(pending.received)
            in_tls = pending.received[:1] == TLS_BEGINS
            pending.received = b""
            # A new connection's buffer has room for these few bytes, or something is wrong.
            if answer and pending.sock.send(answer) != len(answer):
                self._drop(pending, "it does not read the answer")
                return
            if handshake.refusal:
                (self._dismiss if in_tls else self._drop)(pending, handshake.refusal)
                return
            if pending in self._silent:
                del self._silent[pending]
                self._greeted[pending] = None
        self._forget(pending)
        try:
            self._deliver(pending.sock)
        except Exception:
            _LOGGER.exception("a connection could not be delivered")
            pending.sock.close()

    def _dismiss(self, pending: _Pending, reason: str) -> None:
        """Hang up once the peer has read the reason: closing a socket with unread bytes would
        discard the reason, too.
        """
        _LOGGER.info("refused a connection: %s", reason)
        pending.discarded = 0
        pending.sock.shutdown(socket.SHUT_WR)

    def _discard(self, pending: _Pending, discarded: int) -> None:
        # Raw bytes, also of a TlsSocket.
        data = socket.socket.recv(pending.sock, _MAX_DISCARDED - discarded)
        pending.discarded = discarded + len(data)
        if not data or pending.discarded == _MAX_DISCARDED:
            self._forget(pending)
            pending.sock.close()

    def _drop_oldest(self, reason: str) -> None:
        self._drop(next(iter(self._silent or self._greeted)), reason)

    def _drop(self, pending: _Pending, reason: str, level: int = logging.INFO) -> None:
        """Close a connection, and log the reason: at debug level if it sent nothing, as a member's
        probe does.
        """
        self._forget(pending)
        _LOGGER.log(level, "refused a connection: %s", reason)
        pending.sock.close()

    def _forget(self, pending: _Pending) -> None:
        self._silent.pop(pending, None)
        self._greeted.pop(pending, None)
        self._selector.unregister(pending.sock)
