"""Requests to the members of an etcd cluster: JSON over HTTP, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any

from transport._errors import DistStoreError, StoreSilentError
from transport._net.fork import refusal
from transport._net.sockets import format_address
from transport._store.etcd.address import EtcdAddress
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import SLICE_SECONDS, next_slice

if TYPE_CHECKING:
    from transport._net.tls import Tls

Body = dict[str, Any]

_ANSWER_SECONDS = 5.0
"""How long one member may take to answer before the client tries the next one."""
_PAUSE_SECONDS = 0.1
_SILENT = "silent"
_NOT_FOUND = 5
_BAD_TOKEN = 16
_TRANSIENT = (4, 14)
"""gRPC's codes: deadline exceeded, unavailable (no leader, a new leader)."""
_BUSY = "too many requests"


class RefusedError(DistStoreError):
    """etcd refused a request, or another program answered: retrying does not help."""


class _UnavailableError(Exception):
    """This member cannot answer now; another one, or a later request, may."""


class _Connection(HTTPConnection):
    """One connection to ``member``, with TLS if the job uses it."""

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
    """A client of the cluster at ``address``. Thread-safe. ``name`` is its name in messages."""

    def __init__(self, address: EtcdAddress, tls: Tls | None) -> None:
        self.name: str = f"EtcdStore({address.shown})"
        self.closed: bool = False
        self._address = address
        self._tls = tls
        self._token = ""
        self._pid = os.getpid()
        self._members = deque(address.members)
        self._idle: deque[_Connection] = deque()

    def call(self, what: str, path: str, body: Body, deadline: Deadline) -> Body:
        """Return etcd's answer to ``body`` at ``path``; ``what`` names the request in messages.

        If a member fails or is silent, the client tries the next one, so etcd may execute a
        request twice. Raises DistStoreError for a refused request, and at the deadline;
        StoreSilentError if all members were silent until then.
        """
        failures: dict[str, str] = {}
        share = min(deadline.seconds / len(self._members), _ANSWER_SECONDS)
        while True:
            self.check_open()
            member, fresh = self._members[0], not self._idle
            answer_by = Deadline.after(max(min(share, deadline.remaining()), 0.01))
            try:
                if self._address.user and not self._token:
                    account = {"name": self._address.user, "password": self._address.password}
                    who = f"the password of user {self._address.user!r}"
                    answer = self._request(who, member, "auth/authenticate", account, answer_by)
                    self._token = answer["token"]
                return self._request(what, member, path, body, answer_by)
            except (OSError, HTTPException, _UnavailableError) as error:
                silent = isinstance(error, TimeoutError)
                reason = f"{_SILENT} for {answer_by.seconds:.2g} s" if silent else ""
                reason = reason or str(getattr(error, "strerror", None) or error or repr(error))
                if fresh or silent:  # otherwise etcd may have closed an idle connection
                    failures[format_address(*member)] = reason
                    if member == self._members[0]:
                        self._members.rotate(-1)
            if deadline.expired:
                why = "; ".join(f"{where}: {reason}" for where, reason in failures.items())
                text = f"{self.name}: no answer to {what} within {deadline.seconds:g} s"
                text = f"{text}: {why or 'its connections broke'}"
                if all(reason.startswith(_SILENT) for reason in failures.values()):
                    raise StoreSilentError(text, deadline.seconds)
                raise DistStoreError(text)
            if len(failures) == len(self._members):
                time.sleep(next_slice(min(_PAUSE_SECONDS, deadline.remaining())))

    def watch(
        self, bounds: Body, revision: int, deadline: Deadline, ended: Callable[[], bool]
    ) -> None:
        """Wait until a key in ``bounds`` changes, from ``revision`` on.

        Also returns at the deadline, when the connection ends, when this client is closed, and
        when ``ended()`` is true: the caller has to read the keys again.
        """
        request = {"create_request": {**bounds, "start_revision": str(revision)}}
        connection = _Connection(self._members[0], _ANSWER_SECONDS, self._tls)
        received = b""
        try:
            connection.request("POST", "/v3/watch", json.dumps(request), self._headers())
            while not (deadline.expired or self.closed or ended()):
                connection.sock.settimeout(
                    max(next_slice(min(deadline.remaining(), SLICE_SECONDS)), 0.001)
                )
                with contextlib.suppress(TimeoutError):
                    data = connection.sock.recv(1 << 16)
                    received += data
                    if not data or b'"error"' in received:
                        break
                    if b'"events"' in received or b'"canceled"' in received:
                        return
        except OSError:
            pass  # the next request reports the error
        finally:
            connection.close()
        if not (deadline.expired or self.closed or ended()):
            time.sleep(next_slice(min(_PAUSE_SECONDS, deadline.remaining())))

    def close(self) -> None:
        """End all pending requests within a moment, and refuse later ones. Never blocks."""
        self.closed = True
        while self._idle:
            self._idle.pop().close()

    def check_open(self) -> None:
        """Raise DistStoreError if this client is closed or belongs to another process."""
        if why := refusal(self.name, self._pid, "a new one made there"):
            raise DistStoreError(why)
        if self.closed:
            raise DistStoreError(f"{self.name} is closed")

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _request(
        self, what: str, member: tuple[str, int], path: str, body: Body, deadline: Deadline
    ) -> Body:
        """Return the answer of ``member``."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(member, deadline.seconds, self._tls)
        done = False
        try:
            if connection.sock is None:
                connection.connect()
            assert connection.sock is not None
            connection.sock.settimeout(max(deadline.remaining(), 0.01))
            connection.request("POST", f"/v3/{path}", json.dumps(body), self._headers())
            self._await_answer(connection.sock, deadline)
            with contextlib.closing(connection.getresponse()) as response:
                status, data = response.status, response.read()
                done = connection.member == member and not response.will_close
        finally:
            if done and not self.closed:
                self._idle.append(connection)
            else:
                connection.close()
        where = format_address(*member)
        try:
            answer: Any = json.loads(data)
            message = str(answer.get("message") or answer.get("error"))
        except (ValueError, AttributeError):
            if status >= 500:  # from a proxy
                raise _UnavailableError(f"HTTP status {status}") from None
            raise RefusedError(
                f"{self.name}: {where} answered {what} with HTTP status {status} and {data[:60]!r}:"
                " expected etcd 3.4 or later, and its API over HTTP"
            ) from None
        if status == 200:
            return answer
        if answer.get("code") == _BAD_TOKEN and self._token:
            self._token = ""  # it has expired
            raise _UnavailableError(message)
        if answer.get("code") in _TRANSIENT or _BUSY in message:
            raise _UnavailableError(message)
        text = f"{self.name}: {where} refused {what}: {message}"
        if answer.get("code") == _NOT_FOUND:
            raise DistStoreError(f"{text}: the lease has ended, and with it all keys")
        raise RefusedError(text)

    def _await_answer(self, sock: socket.socket, deadline: Deadline) -> None:
        """Wait until ``sock`` is readable. Ctrl-C and ``close`` end the wait."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(min(deadline.piece(), SLICE_SECONDS) * 1000):
            self.check_open()
            if deadline.expired:
                raise TimeoutError
