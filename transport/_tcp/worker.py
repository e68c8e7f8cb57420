"""Progress on the connections of a communicator: one thread at a time moves their frames.

UCX's name and way: a thread that waits for one frame makes progress on all links of its worker. A
peer whose frames nobody reads would find its window closed, and its kernel would take the way for a
slow one.
"""

from __future__ import annotations

import socket
import threading
from typing import Protocol

from transport._waiting.interrupts import is_held


class Sockets(Protocol):
    """A connection that has ended."""

    first: socket.socket

    def close_sockets(self) -> None:
        """Close them: nobody uses them."""
        ...


class LinkWorker:
    """Owns ``lock``, under which the bytes of its links move, and closes their sockets.

    A descriptor must not be closed, and given to another file, under a system call: the sockets of
    a link that has ended are closed when nobody has the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ended: set[Sockets] = set()

    def leave(self) -> None:
        """Give the lock back."""
        self.lock.release()
        if self._ended:
            self._close_ended()

    def retire(self, connection: Sockets) -> None:
        """Close the sockets of a connection that has been shut down, as soon as nobody uses them.
        Any thread; never blocks.
        """
        self._ended.add(connection)
        self._close_ended()

    def _close_ended(self) -> None:
        # In the middle of a call of this very thread, its end does so.
        if not is_held(self.lock) and self.lock.acquire(blocking=False):
            while self._ended:
                self._ended.pop().close_sockets()
            self.lock.release()
