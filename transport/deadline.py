"""A moment by which a wait must end. Every wait of every floor carries one."""

from __future__ import annotations

import math
import time
from datetime import timedelta

# What Python's lock and condition waits accept; a wait "without end" is cut into such pieces.
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
        """Return the seconds that are left, at least 0 and at most an hour (a legal wait)."""
        return min(max(self.at - time.monotonic(), 0.0), LONGEST_WAIT)

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
