"""A moment by which a wait must end. Every wait of every floor carries one."""

from __future__ import annotations

import math
import re
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from transport._waiting.interrupts import next_slice

# The kernel counts the milliseconds of a poll in an int: longer ones are cut into such pieces.
LONGEST_WAIT = 3600.0

Timeout = float | timedelta | str
"""Seconds, a timedelta, or ``"30s"``, ``"10m"``, ``"500ms"``, ``"1h"``."""

_DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(slots=True, eq=False)
class Deadline:
    """A point on the monotonic clock (``at``), and the number of ``seconds`` that were granted."""

    at: float
    seconds: float

    @classmethod
    def after(cls, timeout: Timeout) -> Deadline:
        """Return the deadline that lies ``timeout`` (see ``to_seconds``) from now.

        Raises ValueError for a negative or NaN timeout.
        """
        seconds = to_seconds(timeout)
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Return the seconds that are left, from 0 to what locks and conditions can wait.

        That is 292 years: a wait of that length that ends without success has passed its deadline.
        """
        return min(max(self.at - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def piece(self) -> float:
        """Return for how many seconds to wait in ``poll`` and the like, at most an hour.

        Check ``expired`` after that wait. In the main thread the piece
        is short, and KeyboardInterrupt is raised after Ctrl-C: see ``next_slice``.
        """
        return next_slice(min(self.remaining(), LONGEST_WAIT))

    @property
    def expired(self) -> bool:
        """True if the moment has passed."""
        return time.monotonic() >= self.at


def read_duration(text: str) -> float | None:
    """Return the seconds that ``"30s"`` stands for (units: ms, s, m, h); None for other text."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def to_seconds(timeout: Timeout, name: str = "timeout") -> float:
    """Return ``timeout``, the argument ``name``, in seconds: a number of them, a timedelta,
    ``"30s"``.

    Raises TypeError when it is none of these (a string of digits has no unit), ValueError when it
    is negative or NaN.
    """
    expected = f"{name} must be a number of seconds >= 0, a timedelta or a string such as '30s'"
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, str):
        read = read_duration(timeout)
        if read is None:
            raise TypeError(f"{expected}, got {timeout!r}")
        seconds = read
    else:
        try:
            seconds = float(0.0 + timeout)
        except TypeError:
            raise TypeError(f"{expected}, got {timeout!r}") from None
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{expected}, got {timeout!r}")
    return seconds
