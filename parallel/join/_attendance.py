"""Who still has inputs, and what they are about to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshlib import ProcessGroup
from parallel._groups import gathered

Event = tuple[int, ...]
"""What is announced: a few integers, equal on all ranks that announce."""


class Attendance:
    """Keeps the ranks of ``group`` that have inputs in step with those that have none any more.

    Before anything happens that all ranks have to do, all call ``exchange``: a small all-reduce.
    Each announcement x is summed together with x², so that the sums over n ranks tell their common
    value and whether they have one: n Σx² = (Σx)² only if all are equal.
    """

    def __init__(self, group: ProcessGroup, length: int) -> None:
        self._group = group
        self._length = length
        self.active = list(range(group.size()))
        """Group ranks with inputs, as of the last exchange in which there were any."""

    def exchange(self, event: Event | None, describe: Callable[[Event], str]) -> Event | None:
        """Return what the ranks with inputs announce, or None if there are none any more.

        ``event`` is this rank's announcement, None if it is out of inputs itself. Raises
        RuntimeError on all ranks, with a table of what each announced, when they differ.
        """
        row = np.array(event or (0,) * self._length, np.int64)
        totals = np.concatenate([[np.int64(event is not None)], row, row * row])
        self._group.all_reduce(totals)
        count = int(totals[0])
        if not count:
            return None
        sums, squares = totals[1 : 1 + self._length], totals[1 + self._length :]
        if count != len(self.active):
            self.active: list[int] = self._attending(event is not None)
        if not np.array_equal(squares * count, sums * sums):
            raise RuntimeError(self._differences(event, describe))
        return tuple((sums // count).tolist())

    @property
    def absent(self) -> list[int]:
        """Group ranks that were out of inputs at the last exchange."""
        return [rank for rank in range(self._group.size()) if rank not in self.active]

    def _attending(self, here: bool) -> list[int]:
        flags = np.empty(self._group.size(), np.uint8)
        self._group.all_gather_into_tensor(flags, np.array([here], np.uint8))
        return np.flatnonzero(flags).tolist()

    def _differences(self, event: Event | None, describe: Callable[[Event], str]) -> str:
        own = "is out of inputs" if event is None else f"begins {describe(event)}"
        said = gathered(own, self._group)
        rows = [f"  rank {rank}: {text}" for rank, text in enumerate(said)]
        return "\n".join([f"inside Join the ranks of {self._group} do not do the same:", *rows])


def global_ranks(group: ProcessGroup, ranks: Sequence[int]) -> list[int]:
    """Return the global ranks of group ranks."""
    return [group.ranks[rank] for rank in ranks]
