"""What a connection is like, from the kernel: its round trip, and how fast it has been."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transport.link import UNKNOWN, Pace
from transport.net.round_trip import INFO_BYTES, round_trip_in, round_trip_of

_LOGGER = logging.getLogger("meshlib.transport")

# Of Linux's struct tcp_info: bytes and microseconds, but for the milliseconds since something was
# sent.
_CONFIRMED_AND_BUSY = struct.Struct("@120xQ40xQ")
# The timeout; the largest segment, and how many of them are not yet confirmed; since when nothing
# was sent; the window, in segments, from which on it grows slowly, and the one now; how many bytes
# were confirmed, and at which rate the last ones.
_WINDOW = struct.Struct("@8xI4xI4xI16xI28xII36xQ32xQ")

# Less than so many microseconds with something to send tell nothing.
_TELLING = 50_000

# Bytes a second that a fast network card moves, twice: half of them are confirmed only later.
_FAST = 1e9

# A window that has shrunk is still this many segments.
_LEAST_SEGMENTS = 10

# Parts of the kernel's memory that payloads get, at the least.
_USABLE_HERE, _USABLE_THERE = 0.75, 0.45

# No connection asks for more memory.
_MOST = 16 << 20


def pace_of(sockets: Sequence[socket.socket]) -> Pace:
    """Return the pace of a link over ``sockets``. Where the kernel is an older one or not Linux's
    own, there may be nothing but a round trip.
    """
    found = [_read(sock) for sock in sockets]
    round_trips = [each.round_trip for each in found if each.round_trip]
    return Pace(min(round_trips, default=0.0), sum(each.rate for each in found))


class Window(NamedTuple):
    """How many bytes a connection's control of congestion allows it to have ``under_way``, and for
    how many there is ``room`` in the kernel's memory, here and at a peer with the same settings;
    the ``rate`` at which the last ones were confirmed (bytes a second), its least round trip
    (seconds), and whether it was allowed twice as much before it was at rest. However long that
    was, it is allowed ``least`` bytes.
    """

    allowed: int
    least: int
    room: int
    under_way: int
    rate: float
    round_trip: float
    shrunk: bool


def window_of(sock: socket.socket, begins_anew: bool) -> Window | None:
    """Return the window of a connection now; None where the kernel does not tell.

    ``begins_anew`` says whether the window is halved for each timeout in which nothing is sent.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
        asked_for = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except OSError:  # gone: the next call finds out
        return None
    if len(info) < _WINDOW.size:
        return None
    by_itself, arriving = _limits()
    room = int(_USABLE_HERE * max(by_itself, asked_for))
    if arriving:
        room = min(room, int(_USABLE_THERE * arriving))
    timeout, segment, under_way, rest, losing, segments, confirmed, rate = _WINDOW.unpack_from(info)
    timeouts = min(1000 * rest // timeout, 32) if begins_anew and timeout and not under_way else 0
    segments = max(segments >> timeouts, min(segments, _LEAST_SEGMENTS))
    allowed = segments * segment
    # It had more: a window that only grows is what was confirmed, and where the network is what
    # kept it small, that is known as well.
    shrunk = begins_anew and 4 * allowed <= confirmed and 2 * allowed <= min(losing * segment, room)
    round_trip = round_trip_in(info)
    least = _LEAST_SEGMENTS * segment
    return Window(allowed, least, room, under_way * segment, rate, round_trip, shrunk)


def begins_anew(sock: socket.socket) -> bool:
    """Return whether a connection that was at rest sends slowly at first."""
    with contextlib.suppress(OSError):
        control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if not control.startswith(b"bbr"):
            return _setting("tcp_slow_start_after_idle")[:1] == ["1"]
    return False


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
    except OSError:  # gone: the next call finds out
        return UNKNOWN
    confirmed, busy = 0, 0
    if len(info) >= _CONFIRMED_AND_BUSY.size:
        confirmed, busy = _CONFIRMED_AND_BUSY.unpack_from(info)
    return Pace(round_trip_in(info), 1e6 * confirmed / busy if busy >= _TELLING else 0.0)


class Advice:
    """Logs what would make a rank's links faster: once, as it is the same for all like them."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def narrow_windows(self, name: str, connections: int, round_trip: float) -> None:
        """Log, once for each number of ``connections``, which settings of the kernel would save
        them. ``name`` is the link's; ``round_trip`` is in seconds.
        """
        limits = _limits()
        limits = max(limits[0], _on_request()), limits[1]
        self._say_once(
            connections,
            f"{connections} connections to {name} and its like, with a round trip of"
            f" {1e3 * round_trip:.1f} ms: the kernel's limits of {limits[0]} and {limits[1]}"
            " bytes hold one back. On all hosts, sysctl net.ipv4.tcp_wmem and net.ipv4.tcp_rmem"
            f" with a maximum of {connections * max(min(limits), 1 << 20)} would do with one",
        )

    def slow_starts(self, name: str, round_trip: float) -> None:
        """Log, once, which setting of the kernel lets links that pause go on as before."""
        self._say_once(
            "slow starts",
            f"connections such as the one to {name}, with a round trip of"
            f" {1e3 * round_trip:.1f} ms, send nothing for longer than their timeout"
            " between calls, and begin slowly after each such pause. On all hosts, sysctl"
            " net.ipv4.tcp_slow_start_after_idle=0 has them go on as before",
        )

    def _say_once(self, about: object, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            _LOGGER.warning(text)


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
