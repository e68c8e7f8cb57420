"""Connections that are lost all at once."""

from __future__ import annotations

import select
import socket
import struct

LONG = 60.0


def reset(sock: socket.socket) -> None:
    """Close it as the kernel does where nobody accepts, or what was sent is not read."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
    sock.close()


def await_end(sock: socket.socket) -> None:
    """Return when the other end's reset has arrived."""
    poller = select.poll()
    poller.register(sock, 0)  # POLLHUP comes unasked
    assert poller.poll(LONG * 1000)
