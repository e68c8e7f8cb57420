"""Links to distant peers, whose round trip is ``FAR_SECONDS`` or more.

The kernel's window limit for one connection is less than a distant path carries in a round trip. So
such a link stripes large payloads over several connections, and keeps all their windows full. Every
other link has one connection. The round trip is measured when the first connection is made.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from pathlib import Path

from transport import _environment as environment
from transport._net.round_trip import round_trip_of

_LOGGER = logging.getLogger("meshlib.transport")

FAR_SECONDS = 1e-3
_CONNECTIONS = 4
_MOST_CONNECTIONS = 16
_USUAL_BUFFER = 4 << 20
# A link that moves at least this fraction of its window per round trip is limited by the window.
_HELD_BACK = 0.7


def connections_from_environment() -> int:
    """Return the number of connections of a link to a distant peer.

    Raises ValueError for a ``MESHLIB_TCP_CONNECTIONS`` that is not a number from 1 to 16.
    """
    value = os.environ.get(environment.TCP_CONNECTIONS, "").strip() or str(_CONNECTIONS)
    if not value.isdecimal() or not 1 <= int(value) <= _MOST_CONNECTIONS:
        raise ValueError(
            f"{environment.TCP_CONNECTIONS} is {value!r}; expected a number of connections from 1"
            f" to {_MOST_CONNECTIONS}"
        )
    return int(value)


def connections_to(sock: socket.socket, far: int) -> int:
    """Return the number of connections of the link whose first one is ``sock``: ``far`` for a
    distant peer, else one. The connecting member decides.
    """
    return far if _round_trip(sock) >= FAR_SECONDS else 1


def _round_trip(sock: socket.socket) -> float:
    return 0.0 if is_on_this_machine(sock) else round_trip_of(sock)


class Distance:
    """The distance to the peer at the other end of ``sock``, the first of a link's ``connections``.

    ``name`` is the peer's name in messages.
    """

    _warned = False

    def __init__(self, sock: socket.socket, name: str, connections: int) -> None:
        self._name = name
        self._connections = connections
        self._round_trip = _round_trip(sock)
        far = connections > 1 or self._round_trip >= FAR_SECONDS
        self.window: int = connections * _send_limit() if far else 0
        """The bytes to keep in flight on the link; 0: one frame at a time."""

    def note_sent(self, nbytes: int, seconds: float) -> None:
        """Record the time to send a payload. Warn once per process if the kernel's settings limit
        the link.
        """
        if Distance._warned or nbytes < self.window or not seconds:
            return
        under_way = nbytes / seconds * self._round_trip
        if under_way >= _HELD_BACK * self.window:
            Distance._warned = True
            _LOGGER.warning(
                "the link to %s, with a round trip of %.1f ms, moves %.0f MB/s, the limit of"
                " %d connections; to double that, set the maximum of net.ipv4.tcp_wmem and"
                " net.ipv4.tcp_rmem to %d with sysctl on all hosts, or use more connections (%s)",
                self._name,
                1e3 * self._round_trip,
                nbytes / seconds / 1e6,
                self._connections,
                2 * _send_limit(),
                environment.TCP_CONNECTIONS,
            )


def is_on_this_machine(sock: socket.socket) -> bool:
    """Return whether both ends of a connection are on this machine."""
    try:
        return sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # the peer has hung up, which the first call will report
        return False


@functools.cache
def _send_limit() -> int:
    """Return the kernel's limit of a connection's send buffer, in bytes."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return _USUAL_BUFFER
