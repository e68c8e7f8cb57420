"""Batches of a sampler's indices, equally many on all replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from parallel.samplers.distributed import DistributedSampler


class Batch(NamedTuple):
    """Indices, and how many of them count: the first ``valid``; the rest is padding."""

    indices: list[int]
    valid: int


class DistributedBatchSampler:
    """Yields ``Batch`` values from a ``DistributedSampler``: the same number on every replica.

    So a collective in each step matches, in training and in evaluation. With an evaluation sampler,
    whose shares differ by one, the replicas that have less get their last index again, not counted
    in ``valid``: a metric summed over the first ``valid`` of each batch is exact.

    Args:
        sampler: whose indices are taken; its epochs and state are used.
        batch_size: indices a batch, on one replica.
        drop_last: leave out a last batch that is not full. Not with an evaluation sampler.
    """

    def __init__(
        self, sampler: DistributedSampler, batch_size: int, drop_last: bool = False
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if drop_last and sampler.evaluation:
            raise ValueError("drop_last leaves samples out, which evaluation must not")
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._batches = 0

    def __len__(self) -> int:
        """Return how many batches the next pass yields, the same on every replica."""
        count = self.sampler.longest
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass over the epoch, or after a resume over the rest of it."""
        self._batches = 0
        return self._walk(
            len(self), self.sampler.longest, len(self.sampler), self.sampler.num_valid
        )

    def _walk(self, batches: int, longest: int, own: int, valid: int) -> Iterator[Batch]:
        indices = iter(self.sampler)
        for number in range(batches):
            begin = number * self.batch_size
            size = min(self.batch_size, longest - begin)
            # Never ask for one index too many: that would end the epoch before the batch is used.
            chosen = list(islice(indices, min(size, own - begin)))
            if len(chosen) < size:  # by one, and only in evaluation
                chosen.append(chosen[-1] if chosen else 0)
            real = min(max(valid - begin, 0), size)
            self._batches = number + 1
            yield Batch(chosen, real)
        for _ in indices:  # what a dropped batch leaves: the epoch must come to its end
            pass
        self._batches = 0

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next pass goes through."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the sampler's state after ``num_batches`` of the pass under way were used.

        By default after those that were yielded. The same on all replicas.
        """
        batches = self._batches if num_batches is None else num_batches
        if not 0 <= batches <= len(self):
            raise ValueError(f"num_batches must lie in [0, {len(self)}], got {batches}")
        over = batches == len(self)
        return self.sampler.state_dict(self.sampler.longest if over else batches * self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, on any number of replicas and with any batch size."""
        self.sampler.load_state_dict(state)
        self._batches = 0
