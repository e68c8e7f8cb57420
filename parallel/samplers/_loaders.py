"""Adapters from ``DistributedSampler`` to other data loaders.

Loaders draw indices ahead, in other threads or processes, so the sampler's count of drawn indices
exceeds the number of trained samples. Count the steps instead. After k steps with batch size b,
the state is one of these::

    state = sampler.state_dict(num_consumed=k * b)      # DistributedSampler (or count samples)
    state = batches.state_dict(num_batches=k)           # DistributedBatchSampler

Any number of replicas can load it. These adapters do not end the sampler's epoch: call
``set_epoch`` before the next epoch.
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

    After a resume the pass is the remainder of the epoch. Instances can be pickled, and several
    threads may read one.

    Raises TypeError for a sampler of another type.
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
        """Return the dataset index at a place of this replica's pass; for a slice, a list.

        A negative ``index`` counts from the end. Raises IndexError if it is out of range.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not isinstance(index, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            index = to_whole_number(index, "index")
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} indices")
        number, offset = divmod(index % len(self), _BLOCK)
        cached, indices = self._block  # replaced atomically, for readers in other threads
        if cached != number:
            begin = number * _BLOCK
            places = self._shard.places(begin, min(begin + _BLOCK, len(self)))
            indices = self._order.apply(places).tolist()
            self._block = (number, indices)
        return indices[offset]

    def place(self, index: int) -> int:
        """Return the place of this replica's ``index``-th sample in the epoch's global order."""
        return int(self._shard.places(index, index + 1)[0])

    def __repr__(self) -> str:
        # Loaders compare this text with a checkpoint's to detect a mismatch.
        order = zlib.crc32(np.array(self[: min(len(self), _BLOCK)], np.int64).tobytes())
        return f"EpochIndices(epoch={self.epoch}, {self._shard}, order={order:08x})"


class EpochView(Sequence[Any]):
    """This replica's samples of ``dataset`` in the order of the sampler's next pass.

    For loaders that read a dataset by index from first to last: ``grain.MapDataset.source(view)``,
    or PyTorch's ``DataLoader(view, batch_size)`` without shuffling.

    Raises TypeError for a sampler of another type.
    """

    def __init__(self, dataset: _RandomAccess, sampler: DistributedSampler) -> None:
        self._dataset = dataset
        self.indices: EpochIndices = EpochIndices(sampler)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample; for a slice, a list of samples."""
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

    It covers the sampler's next pass. Seed, epoch and the sample's place in the global order
    determine the generator for random transforms, independent of the number of replicas.

    Worker w of W reads every W-th index, and the loader takes batches from the workers in turn.
    Indices are reordered so that each batch has the sampler's next ``batch_size`` indices. The
    used batches are then always a prefix of the pass, after which training can resume. The last W
    batches of a pass share the remaining indices.

    Args:
        sampler: The sampler whose next pass is read.
        batch_size: The loader's batch size. Used only with several workers.
        worker_count: The loader's number of workers.

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
        grain = importlib.import_module("grain.python")  # an optional dependency
        index = self._reordered(index)
        # A key of 128 bits: one word for the epoch, one for the place.
        key = (self._key << 64) + self._indices.place(index)
        generator = np.random.Generator(np.random.Philox(key=key))
        return grain.RecordMetadata(index=index, record_key=self._indices[index], rng=generator)

    def _reordered(self, index: int) -> int:
        """Return the position in the pass of the loader's ``index``-th index."""
        cycle = self._workers * self._batch_size
        begin = index - index % cycle
        each, more = divmod(min(cycle, len(self) - begin), self._workers)
        turn, worker = divmod(index - begin, self._workers)
        return begin + worker * each + min(worker, more) + turn

    def __repr__(self) -> str:
        workers = f", batch_size={self._batch_size}, worker_count={self._workers}"
        return f"GrainSampler({self._indices!r}{workers if self._workers > 1 else ''})"


class IndexBatches:
    """Batches as lists, for PyTorch's ``DataLoader(dataset, batch_sampler=IndexBatches(batches))``.

    The loader needs lists and drops ``Batch.valid``; ``valid(number)`` returns it for the
    ``number``-th batch of the current pass.

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
        """Return the number of samples that count in a batch; later ones are padding."""
        return self._valid[number]
