"""Which places of an epoch's order belong to which replica: pure arithmetic, no state.

An epoch is a sequence of places 0 … size-1; the order says which sample stands at each. Replica r
of R takes places start + r, start + r + R, …: replicas that advance together have, after k samples
each, used exactly the places before ``start + k R``. One number, this *cursor*, is the whole state
of a distributed epoch, and an epoch can go on from it with another R.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class Tail(enum.Enum):
    """What happens to the last places when replicas do not divide what is left."""

    PAD = "pad"  # every replica gets equally many; places past the end begin again at place 0
    DROP = "drop"  # every replica gets equally many; the last places are left out
    UNEVEN = "uneven"  # every place exactly once; some replicas get one sample less


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of replica ``rank`` of ``replicas`` in the places from ``start`` to ``size``."""

    size: int
    replicas: int
    rank: int
    tail: Tail
    start: int = 0

    @property
    def longest(self) -> int:
        """How many samples the replica with the most takes: the steps of the whole group."""
        left = self.size - self.start
        return left // self.replicas if self.tail is Tail.DROP else -(-left // self.replicas)

    @property
    def count(self) -> int:
        """How many samples this replica takes, padding included."""
        return self.valid if self.tail is Tail.UNEVEN else self.longest

    @property
    def valid(self) -> int:
        """How many of them are no padding: the last ``count - valid`` repeat earlier places."""
        left = self.size - self.start
        whole = left // self.replicas
        if self.tail is Tail.DROP:
            return whole
        return whole + (self.rank < left % self.replicas)

    def places(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """Return the places of this replica's samples number ``begin`` to ``end`` (exclusive)."""
        steps = np.arange(begin, end, dtype=np.int64)
        return (self.start + self.rank + steps * self.replicas) % self.size

    def cursor(self, consumed: int) -> int:
        """Return the epoch's cursor after ``consumed`` steps of every replica, at most longest.

        After the last step it is ``size``, also where the tail was dropped: the epoch is over.
        """
        if consumed >= self.longest:
            return self.size
        return self.start + consumed * self.replicas
