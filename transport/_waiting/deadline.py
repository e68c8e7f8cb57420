"""Deadlines, which bound every wait in the library."""

from __future__ import annotations

import math
import re
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from transport._waiting.interrupts import next_slice

# The timeout of poll(2) is an int of milliseconds, so longer waits are cut into pieces.
LONGEST_WAIT = 3600.0

Timeout = float | timedelta | str
"""Seconds, a timedelta, or ``"30s"``, ``"10m"``, ``"500ms"``, ``"1h"``."""

_DURATION = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(slots=True, eq=False)
class Deadline:
    """A point on the monotonic clock (``at``), and the timeout in ``seconds`` that led to it."""

    at: float
    seconds: float

    @classmethod
    def after(cls, timeout: Timeout) -> Deadline:
        """Return the deadline ``timeout`` (see ``to_seconds``) from now.

        Raises ValueError for a negative or NaN timeout.
        """
        seconds = to_seconds(timeout)
        return cls(time.monotonic() + seconds, seconds)

    def remaining(self) -> float:
        """Return the seconds left, from 0 to the longest wait of a lock (292 years)."""
        return min(max(self.at - time.monotonic(), 0.0), threading.TIMEOUT_MAX)

    def piece(self) -> float:
        """Return the seconds for the next wait in ``poll`` or a similar function, at most an hour.

        Check ``expired`` after that wait. In the main thread the piece is short, and
        KeyboardInterrupt is raised after Ctrl-C (see ``next_slice``).
        """
        return next_slice(min(self.remaining(), LONGEST_WAIT))

    @property
    def expired(self) -> bool:
        """True if the deadline has passed."""
        return time.monotonic() >= self.at


def read_duration(text: str) -> float | None:
    """Return a duration such as ``"30s"`` in seconds (units: ms, s, m, h); None for other text."""
    match = _DURATION.fullmatch(text.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def to_seconds(timeout: Timeout, name: str = "timeout") -> float:
    """Return ``timeout``, the argument ``name``, in seconds. It is a number of seconds, a timedelta
    or a string such as ``"30s"``.

    Raises TypeError for another type or a string without a unit, ValueError for a negative timeout
    or NaN.
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
