"""``ElasticBatches``: the samples of each step, for a varying number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshlib.extend import to_whole_number
from parallel._checks import to_count
from parallel.samplers._orders import Permutation, Positions, derive

Policy = Literal["keep", "scale"]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a step's batch.

    ``samples`` are the indices of its samples (int64). ``batch`` is the number of samples of all
    ranks. If each rank multiplies the mean over its samples by ``weight``, the mean of these
    products over the ranks is the mean over the batch. ``scale`` is the batch size divided by the
    batch size of a full mesh.
    """

    samples: Positions
    batch: int
    weight: float
    scale: float

    def microbatches(self, size: int) -> Iterator[Positions]:
        """Yield ``samples`` in pieces of at most ``size``, as evenly as possible.

        Accumulate the gradients of all but the last piece (``no_sync``). Then a rank that gets more
        samples after a loss needs no more memory.
        """
        pieces = max(1, math.ceil(len(self.samples) / to_count(size, "size")))
        yield from np.array_split(self.samples, pieces)


@dataclass(frozen=True, slots=True)
class _PrefetchedSamples:
    """The samples of one rank's shares of consecutive steps, starting at ``cursor``."""

    place: int
    ranks: int
    cursor: int
    batch: int
    samples: list[Positions]

    def at(self, cursor: int, place: int, ranks: int) -> Positions | None:
        """Return the samples of the step that begins at ``cursor``; None for another step."""
        step, rest = divmod(cursor - self.cursor, self.batch)
        if (place, ranks, rest) != (self.place, self.ranks, 0) or not 0 <= step < len(self.samples):
            return None
        return self.samples[step].copy()


_AHEAD = 1024
"""The number of samples to look up at once if shares are small, for speed."""


class ElasticBatches:
    """An endless order of samples, cut into batches for steps and shares for ranks.

    The order consists of passes. Each pass has every sample once, in another order. A batch begins
    at a cursor, the number of samples used before, which changes only when a step is committed. So,
    over any history of losses and joins, each pass uses each sample exactly once.

    Args:
        length: The number of samples.
        batch_size: With ``policy="keep"``, the number of samples in a step on all ranks: remaining
            ranks share the samples of lost ranks. With ``"scale"``, the number of samples on each
            rank: a smaller mesh has batches smaller by the factor ``Share.scale``, for which the
            learning rate can be adjusted.
        policy: ``"keep"`` or ``"scale"``.
        shuffle: Draw another order for each pass. If False, samples are in the order of indices.
        seed: The seed of the orders.

    Raises:
        ValueError: For numbers that are not positive, and an unknown policy.
        TypeError: For a value that is not an integer.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        policy: Policy = "keep",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.length: int = to_count(length, "length")
        self.batch_size: int = to_count(batch_size, "batch_size")
        if policy not in ("keep", "scale"):
            raise ValueError(f"policy is {policy!r}; expected 'keep' or 'scale'")
        self.policy: Policy = policy
        self.shuffle = shuffle
        self.seed: int = to_whole_number(seed, "seed")
        self._ahead: _PrefetchedSamples | None = None

    def batch(self, ranks: int) -> int:
        """Return the number of samples in a step with ``ranks`` ranks that read different data."""
        return self.batch_size if self.policy == "keep" else self.batch_size * ranks

    def share(self, cursor: int, place: int, ranks: int, full: int) -> Share:
        """Return the share of rank ``place`` of ``ranks`` in the step that begins at ``cursor``.

        ``full`` is the number of ranks of a full mesh.
        """
        batch = self.batch(ranks)
        begin, end = (batch * i // ranks for i in (place, place + 1))
        ahead = self._ahead
        samples = None if ahead is None else ahead.at(cursor, place, ranks)
        if samples is None:
            count = max(1, min(_AHEAD // max(1, end - begin), self.length // batch))
            steps = cursor + batch * np.arange(count)
            found = self.at((steps[:, None] + np.arange(begin, end)).ravel())
            rows = list(found.reshape(len(steps), end - begin))
            self._ahead = _PrefetchedSamples(place, ranks, cursor, batch, rows)
            samples = rows[0].copy()
        return Share(
            samples=samples,
            batch=batch,
            weight=(end - begin) * ranks / batch,
            scale=batch / self.batch(full),
        )

    def at(self, positions: Positions) -> Positions:
        """Return the samples at ``positions`` (int64, from 0) in the endless order."""
        if not self.shuffle:
            return positions % self.length
        found = np.empty(len(positions), np.int64)
        passes = positions // self.length
        for number in np.unique(passes).tolist():
            inside = passes == number
            order = Permutation(self.length, derive(self.seed, number))
            found[inside] = order.apply(positions[inside] - number * self.length)
        return found
