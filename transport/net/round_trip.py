"""How long it takes to another host and back, as the kernel knows it."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import time
from collections.abc import Sequence

INFO_BYTES = 256
"""How much of Linux's struct tcp_info is asked for."""

ATTEMPTS = 3
"""How many connections tell how far an address is: what delays one, delays no other."""

_MOST_AT_ONCE = 192

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


def time_connections(addresses: Sequence[tuple[str, int]], seconds: float) -> list[float]:
    """Return how long it takes to connect to each of ``addresses``, all at once: a round trip
    between two kernels. 0.0 where it is refused or impossible, or takes longer than ``seconds``.

    That is the least time of a few connections each, unless there are many addresses. They are
    closed without a word.
    """
    found = [0.0] * len(addresses)
    attempts = max(1, min(ATTEMPTS, _MOST_AT_ONCE // max(1, len(addresses))))
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for number, address in [*enumerate(addresses)] * attempts:
            with contextlib.suppress(OSError):
                family, kind, protocol, _, where = socket.getaddrinfo(
                    *address, type=socket.SOCK_STREAM
                )[0]
                sock = opened.enter_context(socket.socket(family, kind, protocol))
                sock.setblocking(False)
                begin = time.monotonic()
                if sock.connect_ex(where) in (0, errno.EINPROGRESS):  # else there is no way
                    selector.register(sock, selectors.EVENT_WRITE, (number, begin))
        until = time.monotonic() + seconds
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready and time.monotonic() >= until:
                break
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                number, begin = key.data
                if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    # The kernel's own figure does not count how long this thread was not running.
                    took = time.monotonic() - begin
                    took = round_trip_of(key.fileobj) or took
                    found[number] = min(took, found[number] or took)
    return found
