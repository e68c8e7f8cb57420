"""The round-trip time to another host, as the kernel measures it."""

from __future__ import annotations

import contextlib
import socket
import struct

# Fields of Linux's struct tcp_info, in microseconds.
_INFO_BYTES = 256
_SMOOTHED = struct.Struct("@68xI")
_LEAST = struct.Struct("@148xI")
_NEVER = 0xFFFFFFFF


def round_trip_of(sock: socket.socket) -> float:
    """Return the shortest round trip of a connection so far, in seconds; 0.0 if unknown.

    It includes the response time of the peer's kernel, but no delays of threads. If the kernel
    does not report the shortest round trip, return the smoothed one.
    """
    micros, info = 0, b""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on this system
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) >= _LEAST.size:
        (micros,) = _LEAST.unpack_from(info)
    if micros in (0, _NEVER) and len(info) >= _SMOOTHED.size:
        (micros,) = _SMOOTHED.unpack_from(info)
    return micros / 1e6
