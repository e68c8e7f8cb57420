"""Adapters from ``DistributedSampler`` to other data loaders.

Loaders draw indices ahead, in other threads or processes. So the sampler's own count of drawn
indices is not the number of trained samples: count the steps instead. After k steps with batch
size b, one of these is the position of all replicas::

    state = sampler.state_dict(num_consumed=k * b)      # DistributedSampler (or count samples)
    state = batches.state_dict(num_batches=k)           # DistributedBatchSampler

It can be loaded with another number of replicas. Nothing here ends the sampler's epoch: call
``set_epoch`` before the next one.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, overload

import numpy as np

from meshlib.extend import to_whole_number
from parallel._checks import check_instance, to_count
from parallel.samplers._distributed import DistributedBatchSampler, DistributedSampler
from parallel.samplers._orders import derive

_BLOCK = 1024  # indices computed at a time


class _RandomAccess(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...


class EpochIndices(Sequence[int]):
    """This replica's indices in the sampler's next pass, as an immutable sequence.

    After a resume the pass is the rest of the epoch. Instances can be pickled, and read by several
    threads.

    Raises TypeError for another kind of sampler.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        check_instance(sampler, DistributedSampler, "sampler")
        epoch, self._shard = sampler.begin_pass()
        self.epoch: int = epoch
        self._order = sampler.order(self.epoch)
        self._block: tuple[int, list[int]] = (-1, [])
        self.seed: int = sampler.seed

    def __len__(self) -> int:
        return self._shard.count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return the sample at a place of this replica's pass; for a slice, a list of samples.

        A negative ``index`` counts from the end. Raises IndexError for one out of range.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not isinstance(index, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            index = to_whole_number(index, "index")
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} indices")
        number, offset = divmod(index % len(self), _BLOCK)
        held, indices = self._block  # replaced as a whole: other threads see one or the other
        if held != number:
            begin = number * _BLOCK
            places = self._shard.places(begin, min(begin + _BLOCK, len(self)))
            indices = self._order.apply(places).tolist()
            self._block = (number, indices)
        return indices[offset]

    def place(self, index: int) -> int:
        """Return the place in the epoch's global order of this replica's ``index``-th sample."""
        return int(self._shard.places(index, index + 1)[0])

    def __repr__(self) -> str:
        # Loaders compare this to tell whether a checkpoint fits.
        order = zlib.crc32(np.array(self[: min(len(self), _BLOCK)], np.int64).tobytes())
        return f"EpochIndices(epoch={self.epoch}, {self._shard}, order={order:08x})"


class EpochView(Sequence[Any]):
    """This replica's samples in the sampler's next pass, in their order: ``dataset`` rearranged.

    For loaders that read a dataset by index from first to last: ``grain.MapDataset.source(view)``,
    or PyTorch's ``DataLoader(view, batch_size)`` without shuffling.

    Raises TypeError for another kind of sampler.
    """

    def __init__(self, dataset: _RandomAccess, sampler: DistributedSampler) -> None:
        self._dataset = dataset
        self.indices: EpochIndices = EpochIndices(sampler)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample (for a slice, a list of them)."""
        chosen = self.indices[index]
        if isinstance(chosen, list):
            return [self._dataset[i] for i in chosen]
        return self._dataset[chosen]

    def __repr__(self) -> str:
        return f"EpochView({type(self._dataset).__name__}, {self.indices!r})"


class GrainSampler:
    """A sampler for ``grain.DataLoader``: pass it together with ``NoSharding()``. Needs grain.

        loader = grain.DataLoader(
            data_source=source,
            sampler=GrainSampler(sampler, batch_size=32, worker_count=4),
            shard_options=grain.sharding.NoSharding(),
            operations=[..., grain.Batch(32)],
            worker_count=4,
        )

    It covers the sampler's next pass. Random transforms get a generator chosen by seed, epoch and
    the sample's place in the global order: the same with any number of replicas.

    Worker w of W reads every W-th index, and batches leave the workers in turn. Indices are dealt
    out so that each batch is the sampler's next ``batch_size`` indices. The batches used so far are
    then always a prefix of the pass, and training can resume after them. The last W batches of a
    pass share the remaining indices.

    Args:
        sampler: The sampler whose next pass is read.
        batch_size: The loader's. It matters only with several workers.
        worker_count: The loader's.

    Raises ValueError for numbers out of range, TypeError for arguments of another type.
    """

    def __init__(
        self, sampler: DistributedSampler, batch_size: int = 1, worker_count: int = 0
    ) -> None:
        batch_size = to_count(batch_size, "batch_size")
        worker_count = to_count(worker_count, "worker_count", 0)
        self._indices = EpochIndices(sampler)
        self._key = derive(self._indices.seed, self._indices.epoch)
        self._batch_size = batch_size
        self._workers = max(worker_count, 1)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        """Return grain's ``RecordMetadata`` of this replica's ``index``-th sample."""
        grain = importlib.import_module("grain.python")  # by name: it may not be installed
        index = self._dealt(index)
        # Keys of 128 bits: one word for the epoch, one for the place.
        key = (self._key << 64) + self._indices.place(index)
        generator = np.random.Generator(np.random.Philox(key=key))
        return grain.RecordMetadata(index=index, record_key=self._indices[index], rng=generator)

    def _dealt(self, index: int) -> int:
        """Return which of the pass's indices the loader gets as number ``index``."""
        cycle = self._workers * self._batch_size
        begin = index - index % cycle
        each, more = divmod(min(cycle, len(self) - begin), self._workers)
        turn, worker = divmod(index - begin, self._workers)
        return begin + worker * each + min(worker, more) + turn

    def __repr__(self) -> str:
        dealt = f", batch_size={self._batch_size}, worker_count={self._workers}"
        return f"GrainSampler({self._indices!r}{dealt if self._workers > 1 else ''})"


class IndexBatches:
    """Lists of indices, for PyTorch's ``DataLoader(dataset, batch_sampler=IndexBatches(batches))``.

    The loader wants lists; how many of each count (``Batch.valid``) it cannot pass on:
    ``valid(number)`` tells for the ``number``-th batch of the pass under way.

    Raises TypeError for a value that is not a ``DistributedBatchSampler``.
    """

    def __init__(self, batches: DistributedBatchSampler) -> None:
        check_instance(batches, DistributedBatchSampler, "batches")
        self._batches = batches
        self._valid: list[int] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass."""
        self._valid = []
        for batch in self._batches:
            self._valid.append(batch.valid)
            yield batch.indices

    def valid(self, number: int) -> int:
        """Return how many samples of a batch count: the first ones, the rest is padding."""
        return self._valid[number]
