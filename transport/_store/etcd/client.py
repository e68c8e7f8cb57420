"""Requests to the members of an etcd cluster: JSON over HTTP, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Generator
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any

from transport import _environment as environment
from transport._deadline import Deadline
from transport._errors import DistStoreError, StoreSilentError
from transport._interrupts import next_slice
from transport._net.fork import refusal
from transport._net.sockets import format_address
from transport._store.etcd.address import EtcdAddress

if TYPE_CHECKING:
    from transport._net.tls import Tls

Body = dict[str, Any]

_ANSWER_SECONDS = 5.0
"""How long one member may take to answer before the next one is asked."""
_PAUSE_SECONDS = 0.1
_SILENT = "silent"
_BAD_TOKEN = 16
_TRANSIENT = (4, 14)
"""gRPC's codes: deadline exceeded, unavailable (no leader, a new leader)."""
_BUSY = "too many requests"


class _UnavailableError(Exception):
    """This member cannot answer now; another one, or a later request, may."""


class _Connection(HTTPConnection):
    """One connection to ``member``, inside TLS if the job has it."""

    def __init__(self, member: tuple[str, int], seconds: float, tls: Tls | None) -> None:
        super().__init__(*member, timeout=seconds)
        self.member = member
        self._tls = tls

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            wrapped = self._tls.client(self.sock)
            self.sock = wrapped
            wrapped.handshake(Deadline.after(self.timeout or _ANSWER_SECONDS))


class EtcdClient:
    """A client of the cluster at ``address``. Any thread; ``name`` stands for it in messages."""

    def __init__(self, address: EtcdAddress, tls: Tls | None) -> None:
        self._address = address
        self.name: str = f"EtcdStore({address.shown})"
        self._tls = tls
        self._token: str | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._at = 0
        self._idle: deque[_Connection] = deque()
        self._busy: set[socket.socket] = set()
        self._watches: set[socket.socket] = set()
        self._turn = 0
        self.closed: bool = False

    def call(self, what: str, path: str, body: Body, deadline: Deadline) -> Body:
        """Return etcd's answer to ``body`` at ``path``; ``what`` names the request in messages.

        A member that fails or is silent is left for the next one, so etcd may carry out a request
        twice. Raises DistStoreError for a refused request, and at the deadline; StoreSilentError if
        all members were silent until then.
        """
        failures: dict[str, str] = {}
        while True:
            self.check_open()
            member = self._address.members[self._at % len(self._address.members)]
            share = deadline.seconds / len(self._address.members)
            seconds = max(min(share, deadline.remaining(), _ANSWER_SECONDS), 0.01)
            fresh = not self._idle
            try:
                if self._address.user and self._token is None:
                    self._log_in(member, seconds)
                return self._ask(what, member, path, body, seconds)
            except (OSError, HTTPException, _UnavailableError) as error:
                self.check_open()
                if fresh or isinstance(error, TimeoutError):
                    failures[format_address(*member)] = _reason(error, seconds)
                    self._leave(member)
            if deadline.expired:
                why = "; ".join(f"{where}: {reason}" for where, reason in failures.items())
                text = f"{self.name}: no answer to {what}{_who()} within {deadline.seconds:g} s"
                text = f"{text}: {why or 'its connections broke'}"
                silent = all(reason.startswith(_SILENT) for reason in failures.values())
                raise StoreSilentError(text, deadline.seconds) if silent else DistStoreError(text)
            if len(failures) == len(self._address.members):
                time.sleep(next_slice(min(_PAUSE_SECONDS, deadline.remaining())))

    @property
    def turn(self) -> int:
        """Counts how often ``wake`` was called."""
        return self._turn

    def watch(self, begin: str, end: str, revision: int, deadline: Deadline, turn: int) -> None:
        """Wait until a key from ``begin`` to before ``end`` changes, from ``revision`` on.

        Also returns at the deadline, when the connection ends, and when ``wake`` is called after
        ``turn`` was read: look at the keys again.
        """
        member = self._address.members[self._at % len(self._address.members)]
        wish = {"key": begin, "range_end": end, "start_revision": str(revision)}
        text = json.dumps({"create_request": wish}).encode()
        # HTTP/1.0: the answer is plain lines, which a buffer of our own can wait for in slices.
        lines = ["POST /v3/watch HTTP/1.0", f"Content-Length: {len(text)}"]
        lines += [f"Host: {format_address(*member)}"]
        lines += [f"Authorization: {self._token}"] if self._token else []
        request = "\r\n".join(lines).encode() + b"\r\n\r\n" + text
        connection = _Connection(member, _ANSWER_SECONDS, self._tls)
        try:
            connection.connect()
            with self._listed(connection.sock, self._watches, turn) as wanted:
                if not wanted or _changes(connection.sock, request, deadline):
                    return
        except OSError:
            pass
        finally:
            connection.close()
        if not (deadline.expired or self.closed or self._turn != turn):
            # The next request finds out what is wrong with this member.
            time.sleep(next_slice(min(_PAUSE_SECONDS, deadline.remaining())))

    def wake(self) -> None:
        """End the watches under way."""
        with self._lock:
            self._turn += 1
            _shut(self._watches)

    def close(self) -> None:
        """End all requests under way, and refuse later ones. Never blocks."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self.closed = True
            self._turn += 1
            _shut(self._watches | self._busy)
        while self._idle:
            self._idle.pop().close()

    def check_open(self) -> None:
        """Raise DistStoreError when this client is closed or belongs to another process."""
        if why := refusal(self.name, self._pid, "a new one made there"):
            raise DistStoreError(why)
        if self.closed:
            raise DistStoreError(f"{self.name} is closed")

    def _ask(
        self, what: str, member: tuple[str, int], path: str, body: Body, seconds: float
    ) -> Body:
        """Return what ``member`` answers within ``seconds``."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(member, seconds, self._tls)
        done = False
        try:
            if connection.sock is None:
                connection.connect()
            sock = connection.sock
            assert isinstance(sock, socket.socket)
            sock.settimeout(seconds)
            with self._listed(sock, self._busy) as wanted:
                if not wanted:
                    raise DistStoreError(f"{self.name} is closed")
                headers = {"Authorization": self._token} if self._token else {}
                connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
                _await_answer(sock, Deadline.after(seconds))
                with contextlib.closing(connection.getresponse()) as response:
                    status, data = response.status, response.read()
                    done = not response.will_close
        finally:
            if done and not self.closed and connection.member == member:
                self._idle.append(connection)
            else:
                connection.close()
        return self._read(what, member, status, data)

    def _read(self, what: str, member: tuple[str, int], status: int, data: bytes) -> Body:
        where = format_address(*member)
        try:
            answer: Any = json.loads(data)
            if not isinstance(answer, dict):
                raise TypeError
        except (ValueError, TypeError):
            if status >= 500:  # of a proxy before it
                raise _UnavailableError(f"HTTP status {status}") from None
            raise DistStoreError(
                f"{self.name}: {where} answered {what} with HTTP status {status} and {data[:60]!r}:"
                " expected etcd 3.4 or later, and its API over HTTP"
            ) from None
        if status == 200:
            return answer
        message, code = str(answer.get("message") or answer.get("error")), answer.get("code")
        if code in _TRANSIENT or _BUSY in message:
            raise _UnavailableError(message)
        if code == _BAD_TOKEN and self._token is not None:
            self._token = None  # tokens end after some minutes
            raise _UnavailableError(message)
        raise DistStoreError(f"{self.name}: {where} refused {what}{_who()}: {message}")

    def _log_in(self, member: tuple[str, int], seconds: float) -> None:
        account = {"name": self._address.user, "password": self._address.password}
        what = f"the password of user {self._address.user!r}"
        self._token = self._ask(what, member, "auth/authenticate", account, seconds)["token"]

    def _leave(self, member: tuple[str, int]) -> None:
        """Turn to the next member, unless another thread has done so."""
        with self._lock:
            if member == self._address.members[self._at % len(self._address.members)]:
                self._at += 1
        while self._idle:
            self._idle.pop().close()

    @contextlib.contextmanager
    def _listed(
        self, sock: socket.socket, where: set[socket.socket], turn: int | None = None
    ) -> Generator[bool]:
        """Let ``close`` or ``wake`` end the use of ``sock`` in the block; False: it has come."""
        with self._lock:
            wanted = not self.closed and turn in (None, self._turn)
            where.add(sock)
        try:
            yield wanted
        finally:
            with self._lock:
                where.discard(sock)


def _await_answer(sock: socket.socket, deadline: Deadline) -> None:
    """Wait until ``sock`` can be read. Ctrl-C ends the wait."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(deadline.piece() * 1000):
        if deadline.expired:
            raise TimeoutError


def _changes(sock: socket.socket, request: bytes, deadline: Deadline) -> bool:
    """Send the ``request`` for a watch; return whether a change comes before the deadline."""
    sock.sendall(request)
    received = b""
    while not deadline.expired:
        sock.settimeout(max(deadline.piece(), 0.001))
        try:
            data = sock.recv(1 << 16)
        except TimeoutError:
            continue
        received += data
        if not data or b'"error"' in received:
            return False
        _, _, lines = received.partition(b"\r\n\r\n")
        if b'"events"' in lines or b'"canceled"' in lines:
            return True
    return True


def _shut(sockets: set[socket.socket]) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _reason(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"{_SILENT} for {seconds:.2g} s"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _who() -> str:
    """Return which rank asks, where this process is one."""
    rank = os.environ.get(environment.RANK)
    return f" by rank {rank}" if rank else ""
