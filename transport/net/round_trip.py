"""How long it takes to another host and back, as the kernel knows it."""

from __future__ import annotations

import contextlib
import socket
import struct

INFO_BYTES = 256
"""How much of Linux's struct tcp_info is asked for."""

# Microseconds.
_SMOOTHED = struct.Struct("@68xI")
_LEAST = struct.Struct("@148xI")
_NEVER = 0xFFFFFFFF


def round_trip_in(info: bytes) -> float:
    """Return the least round trip in a struct tcp_info, in seconds, 0.0 if there is none. It has in
    it how long the peer's kernel takes to answer. Where the kernel is an older one or not Linux's
    own, the smoothed round trip stands for the least one.
    """
    micros = 0
    if len(info) >= _LEAST.size:
        (micros,) = _LEAST.unpack_from(info)
    if micros in (0, _NEVER) and len(info) >= _SMOOTHED.size:
        (micros,) = _SMOOTHED.unpack_from(info)
    return micros / 1e6


def round_trip_of(sock: socket.socket) -> float:
    """Return the least round trip of a connection, in seconds, 0.0 if that is not known."""
    with contextlib.suppress(OSError):
        return round_trip_in(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES))
    return 0.0
