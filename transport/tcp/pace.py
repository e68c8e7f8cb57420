"""What a connection is like, from the kernel: its round trip, and how fast it has been."""

from __future__ import annotations

import socket
import struct

from transport.link import Pace

# Of Linux's struct tcp_info: microseconds, and bytes a second.
_INFO_BYTES = 256
_SMOOTHED = struct.Struct("@68xI")
_LEAST = struct.Struct("@148xI")
_RATE = struct.Struct("@160xQ")
_UNKNOWN = 0xFFFFFFFF


def pace_of(sock: socket.socket) -> Pace:
    """Return the pace of a connection; the round trip includes how long the peer's kernel takes to
    answer. Where the kernel is an older one or not Linux's own, the smoothed round trip stands for
    the least one, and there may be no rate.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:  # gone: the next call finds out
        return Pace(0.0, 0.0)
    micros, rate = 0, 0
    if len(info) >= _RATE.size:
        (micros,), (rate,) = _LEAST.unpack_from(info), _RATE.unpack_from(info)
    if micros in (0, _UNKNOWN) and len(info) >= _SMOOTHED.size:
        (micros,) = _SMOOTHED.unpack_from(info)
    return Pace(micros / 1e6, float(rate))
