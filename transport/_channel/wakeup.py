"""Wake a thread that polls, from any other thread."""

from __future__ import annotations

import os
from contextlib import suppress


class Wakeup:
    """A descriptor that becomes readable when it is notified.

    The descriptor is open as long as anything refers to the object. A finalizer or a late reply
    keeps the object alive while it notifies, so it never writes into a file that has taken over
    the number of a closed descriptor.
    """

    def __init__(self) -> None:
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)

    def notify(self) -> None:
        """Wake the polling thread. Takes no lock."""
        with suppress(OSError):  # notified already
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ``notify``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
