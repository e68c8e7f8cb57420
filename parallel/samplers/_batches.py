"""Batches of a sampler's indices, equally many on all replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from meshlib.extend import to_whole_number
from parallel._checks import check_instance, to_count
from parallel.samplers._distributed import DistributedSampler
from parallel.samplers._shard import Shard


class Batch(NamedTuple):
    """The ``indices`` of a batch, the first ``valid`` of which count; the rest is padding."""

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

    Raises:
        ValueError: for a batch_size below 1, or drop_last with an evaluation sampler.
        TypeError: for a batch_size that is no whole number, or another kind of sampler.
    """

    def __init__(
        self, sampler: DistributedSampler, batch_size: int, drop_last: bool = False
    ) -> None:
        check_instance(sampler, DistributedSampler, "sampler")
        batch_size = to_count(batch_size, "batch_size")
        if drop_last and sampler.evaluation:
            raise ValueError("drop_last leaves samples out, which evaluation must not")
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._pass = sampler.pass_under_way  # of which so many batches were yielded:
        self._batches = 0

    def __len__(self) -> int:
        """Return how many batches the next pass yields, the same on every replica."""
        return self._count(self.sampler.longest)

    def _count(self, indices: int) -> int:
        return indices // self.batch_size if self.drop_last else -(-indices // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass over the epoch, or after a resume over the rest of it."""
        indices = iter(self.sampler)
        self._pass, self._batches = self.sampler.pass_under_way, 0
        return self._walk(indices, self._pass.shard)

    def _walk(self, indices: Iterator[int], shard: Shard) -> Iterator[Batch]:
        for number in range(self._count(shard.longest)):
            begin = number * self.batch_size
            size = min(self.batch_size, shard.longest - begin)
            # Never ask for one index too many: that would end the epoch before the batch is used.
            chosen = list(islice(indices, min(size, shard.count - begin)))
            if len(chosen) < size:  # by one, and only in evaluation
                chosen.append(chosen[-1] if chosen else 0)
            real = min(max(shard.valid - begin, 0), size)
            self._batches = number + 1
            yield Batch(chosen, real)
        for _ in indices:  # what a dropped batch leaves: the epoch must come to its end
            pass

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next pass goes through. Raises as the sampler does."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the sampler's state after ``num_batches`` of the pass under way were used.

        By default after those that were yielded. The same on all replicas. Raises ValueError for a
        number of batches that the pass does not have, TypeError for what is no whole number.
        """
        epoch, shard = under_way = self.sampler.pass_under_way
        if num_batches is None:
            if self.sampler.epoch != epoch:  # the pass has come to its end
                return self.sampler.state_dict()
            num_batches = self._batches if under_way == self._pass else 0
        count = self._count(shard.longest)
        num_batches = to_whole_number(num_batches, "num_batches")
        if not 0 <= num_batches <= count:
            raise ValueError(f"num_batches must lie in [0, {count}], got {num_batches}")
        over = num_batches == count
        return self.sampler.state_dict(shard.longest if over else num_batches * self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, on any number of replicas and with any batch size.

        Raises as the sampler does.
        """
        self.sampler.load_state_dict(state)
        self._pass, self._batches = self.sampler.pass_under_way, 0
