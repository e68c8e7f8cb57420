"""What wakes a thread that polls, from any other thread."""

from __future__ import annotations

import os
from contextlib import suppress


class Bell:
    """Readable for a poll once it was rung. It lasts as long as anybody refers to it.

    Who may ring when all is over (a finalizer, a late reply) holds it while ringing: its number is
    then not that of a socket or file which was opened since, into which the ring would be written.
    """

    def __init__(self) -> None:
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.fd)

    def ring(self) -> None:
        """Wake who polls. Takes no lock."""
        with suppress(OSError):  # it rings already
            os.eventfd_write(self.fd, 1)

    def answer(self) -> None:
        """Have it be silent until it is rung again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
