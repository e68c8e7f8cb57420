"""A moment by which a wait must end. Every wait of every floor carries one."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta

# The kernel counts the milliseconds of a poll in an int: longer ones are cut into such pieces.
LONGEST_WAIT = 3600.0


class Deadline:
    """A point on the monotonic clock (``at``), and the number of ``seconds`` that were granted."""

    __slots__ = ("at", "seconds")

    def __init__(self, at: float, seconds: float) -> None:
        self.at = at
        self.seconds = seconds

    @classmethod
    def after(cls, timeout: float | timedelta) -> Deadline:
        """Return the deadline that lies ``timeout`` (seconds, or a timedelta) from now.

        Raises ValueError for a negative or NaN timeout.
        """
        seconds = to_seconds(timeout)
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Return the seconds that are left, from 0 to what locks and conditions can wait.

        That is 292 years: a wait for so long that ends in vain has passed its deadline.
        """
        return min(max(self.at - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def piece(self) -> float:
        """Return for how many seconds to wait in ``poll`` and its like, at most an hour.

        Only ``expired`` tells whether the deadline has passed then.
        """
        return min(self.remaining(), LONGEST_WAIT)

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self.at


def to_seconds(timeout: float | timedelta, name: str = "timeout") -> float:
    """Return ``timeout``, the argument ``name``, in seconds.

    Raises TypeError when it is no number (a string of digits is none), ValueError when it is
    negative or NaN.
    """
    expected = f"{name} must be a number of seconds >= 0 or a timedelta"
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    else:
        try:
            seconds = float(0.0 + timeout)
        except TypeError:
            raise TypeError(f"{expected}, got {timeout!r}") from None
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{expected}, got {timeout!r}")
    return seconds
