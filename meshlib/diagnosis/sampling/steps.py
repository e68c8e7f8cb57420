"""How long a step takes: as the loop says, or by the period of a rank's calls.

Training repeats itself: the same calls, made at the same lines, of the same sizes, in the same
order. The period of that sequence is a step, whatever the loop looks like.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

REPEATED = 3
"""So often the newest calls must have repeated themselves to be taken for steps."""
_MARKS = 64


class StepMarks:
    """When a loop that knows its steps has ended them (monotonic seconds)."""

    def __init__(self) -> None:
        self.count: int = 0
        """How many steps were ended."""
        self.moments: deque[float] = deque(maxlen=_MARKS)

    def mark(self, now: float, count: int) -> None:
        """Note that a step has ended, the ``count``-th."""
        self.count = count
        self.moments.append(now)


def period_of(calls: Sequence[Hashable]) -> int:
    """Return how many calls a step has, 0 when the newest of ``calls`` show no period.

    It is the shortest period of the longest run, up to the newest call, that repeats itself
    ``REPEATED`` times and is at least half of all: a loop inside of a step is shorter than that.
    Found with the prefix function of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977), in time
    linear in the number of calls.
    """
    newest = list(reversed(calls))
    found, border = 0, 0
    borders = [0] * len(newest)
    for i in range(1, len(newest)):
        call = newest[i]
        while border and newest[border] != call:
            border = borders[border - 1]
        if newest[border] == call:
            border += 1
        borders[i] = border
        length = i + 1
        period = length - border
        if length >= REPEATED * period and 2 * length >= len(newest):
            found = period
    return found
