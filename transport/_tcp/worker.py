"""Progress on the connections of a communicator: one thread at a time moves their frames.

As in UCX, a worker is the progress engine of a set of links: a thread that waits for one frame
makes progress on all links of its worker. Otherwise a peer's window would close while its frames
are not read, and its kernel would mistake the path for a slow one.
"""

from __future__ import annotations

import socket
import threading
from typing import Protocol

from transport._waiting.interrupts import is_held


class RetiredConnection(Protocol):
    """An ended connection whose sockets are still open."""

    first: socket.socket

    def close_sockets(self) -> None:
        """Close the sockets; no thread uses them any more."""
        ...


class LinkWorker:
    """The base of workers, which are not threads.

    Bytes of the worker's links move under ``lock``. A descriptor that is closed during a system
    call may be reused for another file, so sockets of an ended link are closed under the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._ended: set[RetiredConnection] = set()

    def leave(self) -> None:
        """Release the lock, and close the sockets of ended connections."""
        self.lock.release()
        if self._ended:
            self._close_ended()

    def retire(self, connection: RetiredConnection) -> None:
        """Close the sockets of a connection that was shut down, once no thread uses them.

        Thread-safe; never blocks.
        """
        self._ended.add(connection)
        self._close_ended()

    def _close_ended(self) -> None:
        # If this thread itself holds the lock, ``leave`` closes them.
        if not is_held(self.lock) and self.lock.acquire(blocking=False):
            while self._ended:
                self._ended.pop().close_sockets()
            self.lock.release()
