"""What a connection is like, from the kernel: its round trip, and how fast it has been."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from transport.link import UNKNOWN, Pace
from transport.net.round_trip import INFO_BYTES, round_trip_in, round_trip_of

_LOGGER = logging.getLogger("meshlib.transport")

# Of Linux's struct tcp_info: microseconds, but for the bytes that the peer has confirmed, and for
# the milliseconds since something was sent. Behind the timeout's, which is in microseconds.
_TIMEOUT_AND_REST = struct.Struct("@8xI32xI")
_CONFIRMED = struct.Struct("@120xQ")
_BUSY_AND_LIMITED = struct.Struct("@168xQQQ")

# Less than so many microseconds with something to send tell nothing.
_TELLING = 50_000

# Bytes a second that a fast network card moves, twice: half of them are confirmed only later.
_FAST = 1e9

# From this round trip on (seconds) a slow beginning matters; a link is told of when several calls
# have had one.
_SLOW_FROM = 0.005
_TELLING_RESTS = 3

# No connection asks for more memory.
_MOST = 16 << 20


def pace_of(sockets: Sequence[socket.socket]) -> Pace:
    """Return the pace of a link over ``sockets``. Where the kernel is an older one or not Linux's
    own, there may be nothing but a round trip.
    """
    found = [_read(sock) for sock in sockets]
    round_trips = [each.round_trip for each in found if each.round_trip]
    # The last connection tells whether those before it were enough.
    return Pace(
        min(round_trips, default=0.0),
        sum(each.rate for each in found),
        len(sockets),
        found[-1].held_back,
        found[-1].room,
    )


def make_room(sock: socket.socket) -> None:
    """Let a connection have as much under way as it is allowed to, where its round trip may need
    it: what a socket asks for may be more than what the kernel gives by itself. Since it is kept
    then whatever the need, only connections with much delay ask.
    """
    by_itself, on_request = _limits()[0], _on_request()
    if on_request > by_itself and round_trip_of(sock) * _FAST > by_itself:
        with contextlib.suppress(OSError):  # gone: the next call finds out
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, on_request // 2)


def _read(sock: socket.socket) -> Pace:
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        asked_for = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except OSError:  # gone: the next call finds out
        return UNKNOWN
    by_itself, receive_room = _limits()
    send_room = max(by_itself, asked_for)
    rate, held_back = 0.0, 0.0
    if len(info) >= _BUSY_AND_LIMITED.size:
        (confirmed,) = _CONFIRMED.unpack_from(info)
        busy, by_receiver, by_buffer = _BUSY_AND_LIMITED.unpack_from(info)
        if busy >= _TELLING:
            rate = 1e6 * confirmed / busy
            held_back = (by_receiver + by_buffer) / busy
    return Pace(round_trip_in(info), rate, 1, held_back, min(send_room, receive_room))


class Advice:
    """Logs what would make a rank's links faster: once, as it is the same for all like them."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def narrow_windows(self, name: str, pace: Pace) -> None:
        """Log, once for each number of connections, which settings of the kernel would save them.

        ``name`` is the link's, ``pace`` what it is like.
        """
        limits = _limits()
        limits = max(limits[0], _on_request()), limits[1]
        self._say_once(
            pace.connections,
            f"{pace.connections} connections to {name} and its like, with a round trip of"
            f" {1e3 * pace.round_trip:.1f} ms: the kernel's limits of {limits[0]} and {limits[1]}"
            " bytes hold one back. On all hosts, sysctl net.ipv4.tcp_wmem and net.ipv4.tcp_rmem"
            f" with a maximum of {pace.connections * max(min(limits), 1 << 20)} would do with one",
        )

    def slow_starts(self, name: str, pace: Pace) -> None:
        """Log, once, which setting of the kernel lets links that pause go on as before."""
        self._say_once(
            "slow starts",
            f"connections such as the one to {name}, with a round trip of"
            f" {1e3 * pace.round_trip:.1f} ms, send nothing for longer than their timeout"
            " between calls, and begin slowly after each such pause. On all hosts, sysctl"
            " net.ipv4.tcp_slow_start_after_idle=0 has them go on as before",
        )

    def _say_once(self, about: object, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            _LOGGER.warning(text)


class Rests:
    """How often a link has sent nothing for so long that its control of congestion begins anew."""

    def __init__(self, advice: Advice) -> None:
        self._advice = advice
        self._count = 0

    def note(self, sock: socket.socket, name: str, pace: Pace) -> None:
        """Look whether the link ``name`` of this ``pace`` is at rest, before a call sends on it.
        If it is so often, the user is told what would mend that.
        """
        if pace.round_trip < _SLOW_FROM or self._count == _TELLING_RESTS:
            return
        with contextlib.suppress(OSError):  # gone: the next call finds out
            self._count += _is_at_rest(sock)
            if self._count == _TELLING_RESTS and _begins_anew(sock):
                self._advice.slow_starts(name, pace)


def _is_at_rest(sock: socket.socket) -> bool:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    if len(info) < _TIMEOUT_AND_REST.size:
        return False
    timeout, rest = _TIMEOUT_AND_REST.unpack_from(info)
    return 1000 * rest > timeout


def _begins_anew(sock: socket.socket) -> bool:
    control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return not control.startswith(b"bbr") and _setting("tcp_slow_start_after_idle")[:1] == ["1"]


@functools.cache
def _limits() -> tuple[int, int]:
    """Return the most memory of a connection, for sending and for receiving; 0 if not known."""
    return _limit("tcp_wmem"), _limit("tcp_rmem")


@functools.cache
def _on_request() -> int:
    """Return the most memory for sending that a socket is given when it asks for half of that; 0 if
    not known. The kernel doubles it, and cuts it to ``net.core.wmem_max`` before, which cannot be
    read in each namespace.
    """
    with contextlib.suppress(OSError), socket.socket() as asks:
        asks.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST)
        return min(asks.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), _MOST)
    return 0


def _limit(name: str) -> int:
    try:
        return int(_setting(name)[2])
    except (ValueError, IndexError):
        return 0


def _setting(name: str) -> list[str]:
    """Return the words of a setting of the kernel; none if it is not known."""
    try:
        return Path("/proc/sys/net/ipv4", name).read_text().split()
    except OSError:
        return []
