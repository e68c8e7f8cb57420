"""TCP sockets with deadlines: listen, connect, and move exact numbers of bytes.

All code that listens or connects uses this module, which handles IPv6, ``TCP_NODELAY``, dead
hosts, forked children and ports.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from transport._errors import DistNetworkError
from transport._net import LOOPBACK
from transport._net.fork import close_in_forked_children
from transport._net.limits import explain
from transport._platform import KEEPALIVE_IDLE
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import next_slice, sliced
from transport._waiting.spinning import PollBackoff

_LOGGER = logging.getLogger("meshlib.transport")

MAX_BACKLOG = 4096

# A host that vanished without closing its connections (power, cable) is noticed after 11 seconds.
_KEEPALIVE = (
    (KEEPALIVE_IDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
)
# The time for one of several addresses, because a host that drops packets does not answer at all.
_ATTEMPT_SECONDS = 5.0
# A starting machine's name may be unknown for a while (a pod's for half a minute, while resolvers
# cache the failed lookup). But a typo should not cost the whole deadline.
_UNKNOWN_NAME_SECONDS = 60.0
_NAME_WARNING_SECONDS = 5.0
_PAUSES = 0.002, 0.1, 1.5
# Errors for which a retry is useless.
_PERMANENT = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.EAFNOSUPPORT, errno.EMFILE}


def tune(sock: socket.socket) -> None:
    """Set the options of an accepted socket: fork safety, and for TCP no delay and keep-alive.

    ``connect`` has already set them.
    """
    close_in_forked_children(sock)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str | None = None, port: int = 0, backlog: int = MAX_BACKLOG) -> socket.socket:
    """Return a listening socket at ``host`` (a name or an IPv4 or IPv6 address).

    None is the loopback; ``""`` is all interfaces, for both families. Port 0 lets the kernel
    choose; see ``getsockname()``.

    Raises DistNetworkError with the host and the port if they cannot be bound.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    where = f"host {host if host else 'all interfaces' if host == '' else LOOPBACK!r} port {port}"
    try:
        if host == "" and socket.has_dualstack_ipv6():
            try:
                return _bind(socket.AF_INET6, ("::", port), backlog, dual=True)
            except OSError as error:
                # IPv6 may be compiled in, but disabled.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        name = LOOPBACK if host is None else host or "0.0.0.0"  # noqa: S104 (asked for by name)
        found = _resolve(name, port, socket.AI_PASSIVE)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on {where}: {_reason(error, host)}") from error
    # For a name with addresses of both families ("localhost"), listen on IPv4, which all clients
    # try.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    failure: OSError | None = None
    for family, _, _, _, address in found:
        try:
            return _bind(family, address, backlog)
        except OSError as error:
            failure = failure or error
    assert failure is not None
    raise DistNetworkError(f"cannot listen on {where}: {_reason(failure, host)}") from failure


def _bind(family: int, address: object, backlog: int, *, dual: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Allows ports of connections that just ended, but not a port that is in use.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        sock.bind(address)  # pyright: ignore[reportArgumentType]
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    close_in_forked_children(sock)
    return sock


def connect(
    host: str,
    port: int,
    deadline: Deadline,
    *,
    refusal_is_final: bool = False,
    before_attempt: Callable[[socket.socket], None] | None = None,
) -> socket.socket:
    """Return a connection to ``host:port``, trying every address of the name.

    Refused connections are retried until the deadline, because the other end may not listen yet.
    With ``refusal_is_final``, a refusal ends the attempts. ``before_attempt`` is called with each
    socket before it connects. Another thread may end the attempt by its ``shutdown``; an exception
    of ``before_attempt`` ends all attempts.

    Raises DistNetworkError with the address, the seconds spent and the last error (its cause).
    """
    begin = time.monotonic()
    pauses = PollBackoff(*_PAUSES)
    warned = False
    while True:
        try:
            return _connect_once(host, port, deadline, before_attempt)
        except OSError as error:
            spent = time.monotonic() - begin
            unresolved = isinstance(error, socket.gaierror)
            permanent = error.errno in _PERMANENT and not unresolved
            no_such_name = unresolved and error.errno != socket.EAI_AGAIN
            unknown = no_such_name and spent > _UNKNOWN_NAME_SECONDS
            gone = refusal_is_final and isinstance(error, ConnectionRefusedError)
            if permanent or unknown or gone or deadline.expired:
                raise DistNetworkError(
                    f"cannot connect to {format_address(host, port)}: tried for {spent:.1f} s,"
                    f" last error: {_reason(error, host)}"
                ) from error
            if unresolved and not warned and spent > _NAME_WARNING_SECONDS:
                warned = True
                _LOGGER.warning("cannot resolve %s yet (%s); retrying", host, error.strerror)
        time.sleep(next_slice(pauses.next(deadline.remaining())))


def is_in_use(error: BaseException | None) -> bool:
    """True if ``error``, or its cause, says that the address is in use."""
    if isinstance(error, DistNetworkError):
        error = error.__cause__
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE


def _resolve(host: str, port: int, flags: int = 0) -> list[tuple[Any, ...]]:
    """Return the addresses of ``host``; raise OSError also for a malformed name."""
    # For a str, Python would load its IDNA codec, even if the name does not need it.
    plain = host.isascii() and all(0 < len(part) < 64 for part in host.split("."))
    name = host.encode() if plain else host
    try:
        return socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:  # a label is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, f"not a host's name: {error}") from error


def _connect_once(
    host: str,
    port: int,
    deadline: Deadline,
    before_attempt: Callable[[socket.socket], None] | None,
) -> socket.socket:
    found = _resolve(host, port)
    failure: OSError | None = None
    for family, _, _, _, address in found:
        sock = socket.socket(family, socket.SOCK_STREAM)
        connected = False
        try:
            if before_attempt is not None:
                before_attempt(sock)
            _await_connection(sock, address, min(deadline.remaining(), _ATTEMPT_SECONDS))
            if sock.getsockname() == sock.getpeername():
                # The kernel chose the target port as the source port: the socket reached itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            tune(sock)
            sock.settimeout(None)
            connected = True
            return sock
        except OSError as error:
            failure = error
        finally:
            if not connected:
                sock.close()
    assert failure is not None
    raise failure


def _await_connection(sock: socket.socket, address: Any, seconds: float) -> None:
    """Connect ``sock`` within ``seconds``; the socket becomes non-blocking."""
    sock.setblocking(False)
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        if not sliced(lambda left: poller.poll(left * 1000), seconds):
            raise TimeoutError("timed out")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _reason(error: OSError, host: str | None) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return explain(error)
    if isinstance(error, socket.gaierror):
        return f"cannot resolve {host} ({error.strerror})"
    if isinstance(error, TimeoutError) and not name:
        return "no answer in time"
    return f"{error.strerror} ({name})" if name else str(error)


def send_all(sock: socket.socket, data: bytes | memoryview, deadline: Deadline) -> None:
    """Send all of ``data``. Raises TimeoutError past the deadline, OSError if sending fails."""
    rest = memoryview(data)
    while rest:
        with _for_a_while(sock, deadline):
            rest = rest[sock.send(rest) :]


def recv_exact_into(sock: socket.socket, into: memoryview, deadline: Deadline) -> None:
    """Fill ``into`` (bytes) from ``sock``.

    Raises TimeoutError past the deadline, ConnectionError if the stream ends before.
    """
    done, size = 0, into.nbytes
    while done < size:
        with _for_a_while(sock, deadline):
            count = sock.recv_into(into[done:])
            if count == 0:
                raise ConnectionResetError(
                    errno.ECONNRESET, f"the connection ended after {done} of {size} bytes"
                )
            done += count


def recv_exact(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Return the next ``size`` bytes of ``sock``; raise the errors of ``recv_exact_into``."""
    data = bytearray(size)
    recv_exact_into(sock, memoryview(data), deadline)
    return bytes(data)


@contextmanager
def _for_a_while(sock: socket.socket, deadline: Deadline) -> Generator[None]:
    """Let ``sock`` block for a slice of the time until ``deadline``, and suppress that timeout. A
    TimeoutError with an errno is the kernel's, which has given up the connection.
    """
    seconds = deadline.piece()
    if seconds <= 0:
        raise TimeoutError(errno.ETIMEDOUT, f"no progress within {deadline.seconds:g} s")
    sock.settimeout(seconds)
    try:
        yield
    except TimeoutError as error:
        if error.errno is not None:
            raise


def local_address_towards(host: str, port: int) -> str:
    """Return this machine's address on the interface with the route to ``host``.

    No packet is sent. Raises DistNetworkError if there is no route.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DistNetworkError(
            f"no interface leads to {format_address(host, port)}: {_reason(error, host)}"
        ) from error


def is_local(host: str) -> bool:
    """Return whether ``host`` is a name or an address of this machine; False if unresolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def resolves(host: str) -> bool:
    """Return whether ``host`` is an address, or a name that resolves now."""
    try:
        return bool(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
    except OSError:
        return False
