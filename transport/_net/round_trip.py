"""The round-trip time to another host, as the kernel measures it."""

from __future__ import annotations

import contextlib
import socket
import struct

# Of Linux's struct tcp_info, microseconds.
_INFO_BYTES = 256
_SMOOTHED = struct.Struct("@68xI")
_LEAST = struct.Struct("@148xI")
_NEVER = 0xFFFFFFFF


def round_trip_of(sock: socket.socket) -> float:
    """Return the least round trip of a connection, in seconds; 0.0 if that is not known. It has in
    it how long the peer's kernel takes to answer, but no thread's pauses. Where the kernel is an
    older one or not Linux's own, the smoothed round trip stands for the least one.
    """
    micros, info = 0, b""
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not on this system
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) >= _LEAST.size:
        (micros,) = _LEAST.unpack_from(info)
    if micros in (0, _NEVER) and len(info) >= _SMOOTHED.size:
        (micros,) = _SMOOTHED.unpack_from(info)
    return micros / 1e6
