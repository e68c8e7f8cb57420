"""``ElasticBatches``: the samples of each step, for any number of present ranks."""

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

    ``samples`` are the numbers of its samples (int64). ``batch`` is the number of samples of all
    ranks together. Each rank multiplies the mean over its samples by ``weight``. The mean of these
    products over the ranks is the mean over the batch. The ratio of the batch's size to that of a
    full mesh is ``scale``.
    """

    samples: Positions
    batch: int
    weight: float
    scale: float

    def microbatches(self, size: int) -> Iterator[Positions]:
        """Yield ``samples`` in pieces of at most ``size``, as even as can be.

        Gradients of all but the last are accumulated (``no_sync``): so a rank that has more samples
        than before, because others are gone, needs no more memory.
        """
        pieces = max(1, math.ceil(len(self.samples) / to_count(size, "size")))
        yield from np.array_split(self.samples, pieces)


@dataclass(frozen=True, slots=True)
class _PrefetchedSamples:
    """The samples of one rank's shares of some steps, the first of which begins at ``cursor``."""

    place: int
    ranks: int
    cursor: int
    batch: int
    samples: list[Positions]

    def at(self, cursor: int, place: int, ranks: int) -> Positions | None:
        """Return those of the step that begins at ``cursor``, None if that is not among them."""
        step, rest = divmod(cursor - self.cursor, self.batch)
        if (place, ranks, rest) != (self.place, self.ranks, 0) or not 0 <= step < len(self.samples):
            return None
        return self.samples[step].copy()


_AHEAD = 1024
"""So many samples are looked up at once, where a share has fewer: that takes little longer."""


class ElasticBatches:
    """Cuts an endless order of samples into the batches of steps, and those into ranks' shares.

    The samples are passed over again and again, in another order each time, and each is there once
    in a pass. Where a batch begins is a single number, the samples used up before it; it moves with
    commits alone. So over any history of losses and joins each sample is used exactly once a pass.

    Args:
        length: The number of samples.
        batch_size: With ``policy="keep"`` the samples of a step, all ranks together: those that are
            left share what lost ones would have had. With ``"scale"`` the samples of each rank: a
            smaller mesh makes smaller batches, and ``Share.scale`` says how much smaller, for the
            learning rate.
        policy: ``"keep"`` or ``"scale"``.
        shuffle: Draw another order for each pass; without it, it is that of the numbers.
        seed: Chooses the orders.

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
        """Return the samples of a step with so many ``ranks`` that read data of their own."""
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
        """Return the samples at ``positions`` (int64, from 0) of the endless order."""
        if not self.shuffle:
            return positions % self.length
        found = np.empty(len(positions), np.int64)
        passes = positions // self.length
        for number in np.unique(passes).tolist():
            inside = passes == number
            order = Permutation(self.length, derive(self.seed, number))
            found[inside] = order.apply(positions[inside] - number * self.length)
        return found
