"""A connection by which a rank learns that a peer, for whose own one it waits, is gone."""

from __future__ import annotations

import socket
from contextlib import suppress


class Watch:
    """``sock`` is that connection once there is one, ``error`` why there is none."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.error: Exception | None = None

    def end(self) -> None:
        """Have the endpoint close the connection, which it watches."""
        if self.sock is not None:
            end_watch(self.sock)


def end_watch(sock: socket.socket) -> None:
    """Have the endpoint close a connection that it watches."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
