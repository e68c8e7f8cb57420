"""Each replica's share of a dataset, in a resumable order, and batches of it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, NamedTuple

from meshlib.extend import to_whole_number
from parallel._checks import check_instance, check_state_dict, describe, to_count
from parallel._groups import GroupLike, resolve
from parallel.samplers._orders import Order, Permutation, ReplicaShard, Sequence, Tail, derive

_BLOCK = 4096  # places computed at a time: vectorised, and little memory


class EpochPass(NamedTuple):
    """One pass of a sampler: its epoch, and the places of the epoch's order that it takes."""

    epoch: int
    shard: ReplicaShard


class DistributedSampler:
    """Yields the indices of this replica's samples, epoch after epoch.

    Shares are those of PyTorch's sampler of the same name, given the epoch's order. Replica r of R
    takes the order's places r, r + R, r + 2R, …. If R does not divide the order, its first places
    are repeated at the end; ``drop_last`` cuts the end off instead.

    Without ``shuffle`` the order is 0, 1, 2, …. With it, seed and epoch choose a pseudorandom
    permutation, equal on all replicas. It is computed place by place, and takes no memory.

    Each complete pass moves on to the next epoch; ``set_epoch`` may still be called.
    ``state_dict`` is a cursor into the epoch's global order. After loading it with another number
    of replicas, every sample of the epoch is still seen exactly once.

    Args:
        dataset: Anything with a length; or the length.
        num_replicas: The number of replicas that share the dataset. Give ``rank`` as well, or
            neither.
        rank: This replica, in [0, num_replicas).
        shuffle: Permute the samples. By default True, and False with ``evaluation``.
        seed: The permutation's seed; equal on all replicas.
        drop_last: Leave out the last samples instead of repeating the first.
        mesh: The replicas, instead of two numbers: ``mesh["dp"]`` or a process group. With neither,
            the default group.
        evaluation: Yield every sample exactly once over all replicas. Some replicas may then get
            one sample less, and ``len`` differs between them.

    Raises:
        ValueError: For a rank outside the replicas, an empty dataset, one with fewer samples than
            replicas (except in evaluation), or arguments that exclude each other.
        TypeError: For a dataset without a length, or numbers that are not integers.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mesh: GroupLike | None = None,
        evaluation: bool = False,
    ) -> None:
        if (num_replicas is None) != (rank is None):
            raise ValueError(
                f"num_replicas and rank go together, got num_replicas={num_replicas}, rank={rank}"
            )
        if num_replicas is None or rank is None:
            group = resolve(mesh, "mesh")
            num_replicas, rank = group.size(), group.rank()
        elif mesh is not None:
            raise ValueError("mesh says the replicas already; drop num_replicas and rank")
        num_replicas = to_count(num_replicas, "num_replicas")
        rank = to_whole_number(rank, "rank")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
        if drop_last and evaluation:
            raise ValueError("drop_last leaves samples out, which evaluation must not")
        try:
            size = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        except TypeError:
            raise TypeError(
                f"dataset must have a length or be one, got {describe(dataset)}"
            ) from None
        if size < 1 or (size < num_replicas and not evaluation):
            raise ValueError(
                f"dataset has {size} samples for {num_replicas} replicas; each replica needs at "
                "least one"
            )
        self.dataset = dataset
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle: bool = not evaluation if shuffle is None else shuffle
        self.seed: int = to_whole_number(seed, "seed")
        self.drop_last = drop_last
        self.evaluation = evaluation
        self.size = size
        self._begin_epoch(0)

    @property
    def shard(self) -> ReplicaShard:
        """The places of the epoch's order that the next pass takes on this replica."""
        tail = Tail.UNEVEN if self.evaluation else Tail.DROP if self.drop_last else Tail.PAD
        return ReplicaShard(self.size, self.num_replicas, self.rank, tail, self._start)

    def __len__(self) -> int:
        """Return the number of indices in this replica's next pass (smaller after a resume)."""
        return self.shard.count

    @property
    def num_valid(self) -> int:
        """The number of indices in the next pass without padding, which comes last."""
        return self.shard.valid

    @property
    def longest(self) -> int:
        """The length of the longest replica's next pass: ``len``, or one more."""
        return self.shard.longest

    def begin_pass(self) -> EpochPass:
        """Return the next pass, and make it the current one."""
        coming = EpochPass(self.epoch, self.shard)
        if coming != self.pass_under_way:
            self.pass_under_way, self._consumed = coming, 0
        return coming

    def __iter__(self) -> Iterator[int]:
        """Begin a pass: the whole epoch, or after a resume the rest of it."""
        coming = self.begin_pass()
        self._consumed = 0
        return self._walk(*coming)

    def _walk(self, epoch: int, shard: ReplicaShard) -> Iterator[int]:
        order = self.order(epoch)
        for begin in range(0, shard.count, _BLOCK):
            places = shard.places(begin, min(begin + _BLOCK, shard.count))
            indices = order.apply(places)
            for i, index in enumerate(indices.tolist(), begin + 1):
                self._consumed = i
                yield index
        if self.epoch == epoch:
            self.epoch, self._start = epoch + 1, 0

    def order(self, epoch: int) -> Order:
        """Return the order of an epoch: a function from places to samples.

        A subclass may return another one. It must be the same on all replicas, and again in a
        run that resumes.
        """
        if not self.shuffle:
            return Sequence()
        return Permutation(self.size, derive(self.seed, epoch))

    def order_options(self) -> dict[str, Any]:
        """Return the options that determine the orders, besides the epoch.

        A run that resumes must have equal ones. A subclass with an ``order`` of its own adds its
        options, as numbers or text.
        """
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def _begin_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch: int = epoch
        self._start = start  # the cursor at which the next pass begins
        self.pass_under_way: EpochPass = EpochPass(epoch, self.shard)
        """The pass that ``state_dict`` describes: the last one that was begun.

        It stays the current one when all its indices were drawn and ``epoch`` has moved on, since
        a loader that draws ahead may still be in it. Before the first pass, and after
        ``set_epoch`` or ``load_state_dict``, it is the next one.
        """
        self._consumed = 0  # indices that the current pass has yielded on this replica

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Naming the current epoch changes nothing: after a resume its rest is still to come. Raises
        ValueError for a negative epoch, TypeError unless it is an integer.
        """
        epoch = to_count(epoch, "epoch", 0)
        if epoch != self.epoch or epoch != self.pass_under_way.epoch:
            self._begin_epoch(epoch)

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """Return the epoch's cursor: equal on all replicas that used equally many samples.

        ``num_consumed`` is the number of samples that this replica's training has used in the
        current pass. Give it where a loader draws indices ahead; by default it is the number of
        indices drawn. Raises ValueError for a negative number or more than the pass has,
        TypeError unless it is an integer.
        """
        epoch, shard = self.pass_under_way
        consumed = (
            self._consumed
            if num_consumed is None
            else to_whole_number(num_consumed, "num_consumed")
        )
        if num_consumed is None and self.epoch != epoch:  # all was drawn
            epoch, shard, consumed = self.epoch, self.shard, 0
        if not 0 <= consumed <= shard.longest:
            raise ValueError(f"num_consumed must be in [0, {shard.longest}], got {consumed}")
        return {"epoch": epoch, "cursor": shard.cursor(consumed), **self.order_options()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, also with another number of replicas.

        Raises ValueError, naming both values, if an option that determines the order (dataset
        size, seed, …) is not the state's: the samples left would be others. Raises TypeError
        unless ``state`` is a state dict.
        """
        check_state_dict(state)
        now = self.order_options()
        was = {name: value for name, value in state.items() if name not in ("epoch", "cursor")}
        for name in {**now, **was}:
            before, after = was.get(name, "not given"), now.get(name, "not given")
            if before != after:
                what = "the dataset's size" if name == "size" else name
                raise ValueError(f"cannot resume: {what} was {before} and is {after} now")
        epoch, cursor = (
            to_whole_number(state.get(name), f"the state's {name}") for name in ("epoch", "cursor")
        )
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= cursor <= self.size:
            raise ValueError(f"cursor must be in [0, {self.size}], got {cursor}")
        if cursor == self.size:
            self._begin_epoch(epoch + 1)
        else:
            self._begin_epoch(epoch, cursor)


class Batch(NamedTuple):
    """The ``indices`` of a batch. The first ``valid`` of them count; the rest is padding."""

    indices: list[int]
    valid: int


class DistributedBatchSampler:
    """Yields ``Batch`` values from a ``DistributedSampler``: the same number on every replica.

    So a collective in each step matches, in training and in evaluation. The shares of an
    evaluation sampler may differ by one. A replica with the smaller share repeats its last index
    and does not count it in ``valid``: a metric over the first ``valid`` of each batch is exact.

    Args:
        sampler: The source of indices, epochs and state.
        batch_size: The number of indices in a batch, on one replica.
        drop_last: Leave out a last batch that is not full. Not with an evaluation sampler.

    Raises:
        ValueError: For a batch_size below 1, or drop_last with an evaluation sampler.
        TypeError: For a batch_size that is not an integer, or another kind of sampler.
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
        self._pass = sampler.pass_under_way
        self._batches = 0  # yielded of this pass

    def __len__(self) -> int:
        """Return the number of batches in the next pass, the same on every replica."""
        return self._count(self.sampler.longest)

    def _count(self, indices: int) -> int:
        return indices // self.batch_size if self.drop_last else -(-indices // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass over the epoch, or after a resume over the rest of it."""
        indices = iter(self.sampler)
        self._pass, self._batches = self.sampler.pass_under_way, 0
        return self._walk(indices, self._pass.shard)

    def _walk(self, indices: Iterator[int], shard: ReplicaShard) -> Iterator[Batch]:
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
        for _ in indices:  # draw a dropped batch's indices, so that the epoch ends
            pass

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Raises the errors of the sampler."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the sampler's state after ``num_batches`` of the current pass were used.

        By default after those that were yielded. The state is the same on all replicas. Raises
        ValueError for more batches than the pass has, TypeError unless it is an integer.
        """
        epoch, shard = under_way = self.sampler.pass_under_way
        if num_batches is None:
            if self.sampler.epoch != epoch:  # the pass has come to its end
                return self.sampler.state_dict()
            num_batches = self._batches if under_way == self._pass else 0
        count = self._count(shard.longest)
        num_batches = to_whole_number(num_batches, "num_batches")
        if not 0 <= num_batches <= count:
            raise ValueError(f"num_batches must be in [0, {count}], got {num_batches}")
        over = num_batches == count
        return self.sampler.state_dict(shard.longest if over else num_batches * self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, on any number of replicas and with any batch size.

        Raises the errors of the sampler.
        """
        self.sampler.load_state_dict(state)
        self._pass, self._batches = self.sampler.pass_under_way, 0
