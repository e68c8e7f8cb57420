"""Resumable samplers that yield each replica's share of a dataset, as indices or batches."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any, NamedTuple

from meshlib.extend import to_whole_number
from parallel._checks import check_instance, check_state_dict, describe, to_count
from parallel._groups import GroupLike, resolve
from parallel.samplers._orders import Order, Permutation, ReplicaShard, Sequence, Tail, derive

_BLOCK = 4096  # places computed at a time: enough to vectorise, with little memory


class EpochPass(NamedTuple):
    """One pass of a sampler: its epoch, and its places in the epoch's order."""

    epoch: int
    shard: ReplicaShard


class DistributedSampler:
    """Yields the indices of this replica's samples, epoch after epoch.

    Within an epoch's order, shares are those of PyTorch's sampler of the same name: replica r of R
    gets places r, r + R, r + 2R, …. If the length is not divisible by R, the first places are
    repeated at the end; ``drop_last`` omits the last places instead.

    Without ``shuffle`` the order is 0, 1, 2, …. With it, seed and epoch determine a pseudorandom
    permutation, equal on all replicas. It is computed place by place, and needs no memory.

    Each complete pass advances to the next epoch; ``set_epoch`` may still be called.
    ``state_dict`` contains a cursor into the epoch's global order. A run with another number of
    replicas that loads it still yields every remaining sample exactly once.

    Args:
        dataset: An object with a length, or the length itself.
        num_replicas: The number of replicas that share the dataset. Requires ``rank``.
        rank: This replica, in [0, num_replicas).
        shuffle: Permute the samples. Default: True, but False with ``evaluation``.
        seed: The permutation's seed; equal on all replicas.
        drop_last: Omit the last samples instead of repeating the first.
        mesh: The replicas, instead of the two numbers: ``mesh["dp"]`` or a process group. Default:
            the default group.
        evaluation: Yield every sample exactly once over all replicas. Some replicas may then get
            one sample fewer than others, so ``len`` may differ between replicas.

    Raises:
        ValueError: For a rank out of range, an empty dataset, a dataset with fewer samples than
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
                f"expected both num_replicas and rank, or neither, got num_replicas={num_replicas},"
                f" rank={rank}"
            )
        if num_replicas is None or rank is None:
            group = resolve(mesh, "mesh")
            num_replicas, rank = group.size(), group.rank()
        elif mesh is not None:
            raise ValueError("mesh determines the replicas; expected no num_replicas and rank")
        num_replicas = to_count(num_replicas, "num_replicas")
        rank = to_whole_number(rank, "rank")
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be in [0, {num_replicas}), got {rank}")
        if drop_last and evaluation:
            raise ValueError("drop_last omits samples, but evaluation needs all of them")
        try:
            size = len(dataset) if isinstance(dataset, Sized) else operator.index(dataset)
        except TypeError:
            raise TypeError(
                f"dataset must have a length or be an integer, got {describe(dataset)}"
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
        """This replica's places in the epoch's order in the next pass."""
        tail = Tail.UNEVEN if self.evaluation else Tail.DROP if self.drop_last else Tail.PAD
        return ReplicaShard(self.size, self.num_replicas, self.rank, tail, self._start)

    def __len__(self) -> int:
        """Return the number of indices in this replica's next pass (smaller after a resume)."""
        return self.shard.count

    @property
    def num_valid(self) -> int:
        """The number of indices in the next pass without the padding at its end."""
        return self.shard.valid

    @property
    def longest(self) -> int:
        """The maximum length of the next pass over all replicas: ``len``, or one more."""
        return self.shard.longest

    def begin_pass(self) -> EpochPass:
        """Return the next pass, and make it the current pass."""
        next_pass = EpochPass(self.epoch, self.shard)
        if next_pass != self.pass_under_way:
            self.pass_under_way, self._consumed = next_pass, 0
        return next_pass

    def __iter__(self) -> Iterator[int]:
        """Begin a pass: the whole epoch or, after a resume, its remainder."""
        next_pass = self.begin_pass()
        self._consumed = 0
        return self._walk(*next_pass)

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
        """Return the order of an epoch, a function from places to samples.

        A subclass may return another order, which must be the same on all replicas and in a
        resumed run.
        """
        if not self.shuffle:
            return Sequence()
        return Permutation(self.size, derive(self.seed, epoch))

    def order_options(self) -> dict[str, Any]:
        """Return the options that, together with the epoch, determine the order.

        They must be equal in a resumed run. A subclass with its own ``order`` adds its options, as
        numbers or text.
        """
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def _begin_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch: int = epoch
        self._start = start  # the cursor at which the next pass begins
        self.pass_under_way: EpochPass = EpochPass(epoch, self.shard)
        """The current pass, which ``state_dict`` describes: the last pass that has begun.

        It remains the current pass after all its indices are drawn and ``epoch`` has advanced,
        because a loader that draws ahead may still use it. Before the first pass, and after
        ``set_epoch`` or ``load_state_dict``, it is the next pass.
        """
        self._consumed = 0  # indices that the current pass has yielded on this replica

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Setting the current epoch has no effect: after a resume, its remainder is the next pass.
        Raises ValueError for a negative epoch, TypeError unless it is an integer.
        """
        epoch = to_count(epoch, "epoch", 0)
        if epoch != self.epoch or epoch != self.pass_under_way.epoch:
            self._begin_epoch(epoch)

    def state_dict(self, num_consumed: int | None = None) -> dict[str, Any]:
        """Return the state: the epoch, its cursor, and the options that determine the order.

        It is equal on all replicas that have used the same number of samples. ``num_consumed`` is
        the number of samples that this replica's training has used in the current pass; pass it if
        a loader draws indices ahead. The default is the number of drawn indices. Raises ValueError
        for a number out of range, TypeError unless it is an integer.
        """
        epoch, shard = self.pass_under_way
        consumed = (
            self._consumed
            if num_consumed is None
            else to_whole_number(num_consumed, "num_consumed")
        )
        if num_consumed is None and self.epoch != epoch:  # all indices were drawn
            epoch, shard, consumed = self.epoch, self.shard, 0
        if not 0 <= consumed <= shard.longest:
            raise ValueError(f"num_consumed must be in [0, {shard.longest}], got {consumed}")
        return {"epoch": epoch, "cursor": shard.cursor(consumed), **self.order_options()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, possibly with another number of replicas.

        Raises ValueError, naming both values, if an option that determines the order (dataset
        size, seed, …) differs from the state's, because the remaining samples would differ. Raises
        TypeError unless ``state`` is a state dict.
        """
        check_state_dict(state)
        now = self.order_options()
        was = {name: value for name, value in state.items() if name not in ("epoch", "cursor")}
        for name in {**now, **was}:
            before, after = was.get(name, "not given"), now.get(name, "not given")
            if before != after:
                what = "the dataset's size" if name == "size" else name
                raise ValueError(f"cannot resume: {what} was {before} and is now {after}")
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
    """The ``indices`` of a batch. The first ``valid`` of them count; the others are padding."""

    indices: list[int]
    valid: int


class DistributedBatchSampler:
    """Yields batches of a ``DistributedSampler``'s indices, the same number on every replica.

    Collectives in each step therefore match, in training and in evaluation. The shares of an
    evaluation sampler may differ by one. A replica with the smaller share repeats its last index
    and does not count it in ``valid``: a metric over the first ``valid`` of each batch is exact.

    Args:
        sampler: The source of indices, epochs and state.
        batch_size: The number of indices in a batch of one replica.
        drop_last: Omit a last batch that is not full. Not allowed with an evaluation sampler.

    Raises:
        ValueError: For a batch_size below 1, or drop_last with an evaluation sampler.
        TypeError: For a batch_size that is not an integer, or a sampler of another type.
    """

    def __init__(
        self, sampler: DistributedSampler, batch_size: int, drop_last: bool = False
    ) -> None:
        check_instance(sampler, DistributedSampler, "sampler")
        batch_size = to_count(batch_size, "batch_size")
        if drop_last and sampler.evaluation:
            raise ValueError("drop_last omits samples, but evaluation needs all of them")
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._pass = sampler.pass_under_way
        self._batches = 0  # the number of batches that this pass has yielded

    def __len__(self) -> int:
        """Return the number of batches in the next pass, the same on every replica."""
        return self._count(self.sampler.longest)

    def _count(self, indices: int) -> int:
        return indices // self.batch_size if self.drop_last else -(-indices // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass: the whole epoch or, after a resume, its remainder."""
        indices = iter(self.sampler)
        self._pass, self._batches = self.sampler.pass_under_way, 0
        return self._walk(indices, self._pass.shard)

    def _walk(self, indices: Iterator[int], shard: ReplicaShard) -> Iterator[Batch]:
        for number in range(self._count(shard.longest)):
            begin = number * self.batch_size
            size = min(self.batch_size, shard.longest - begin)
            # Drawing an index too many would end the epoch before the batch is used.
            chosen = list(islice(indices, min(size, shard.count - begin)))
            if len(chosen) < size:  # by one, and only in evaluation
                chosen.append(chosen[-1] if chosen else 0)
            valid = min(max(shard.valid - begin, 0), size)
            self._batches = number + 1
            yield Batch(chosen, valid)
        for _ in indices:  # drawing a dropped batch's indices ends the epoch
            pass

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. Raises the errors of the sampler."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return the sampler's state after ``num_batches`` of the current pass.

        The default is the number of batches yielded. The state is the same on all replicas. Raises
        ValueError for a number out of range, TypeError unless it is an integer.
        """
        epoch, shard = under_way = self.sampler.pass_under_way
        if num_batches is None:
            if self.sampler.epoch != epoch:  # the pass has ended
                return self.sampler.state_dict()
            num_batches = self._batches if under_way == self._pass else 0
        count = self._count(shard.longest)
        num_batches = to_whole_number(num_batches, "num_batches")
        if not 0 <= num_batches <= count:
            raise ValueError(f"num_batches must be in [0, {count}], got {num_batches}")
        ended = num_batches == count
        return self.sampler.state_dict(shard.longest if ended else num_batches * self.batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, with any number of replicas and any batch size.

        Raises the errors of the sampler.
        """
        self.sampler.load_state_dict(state)
        self._pass, self._batches = self.sampler.pass_under_way, 0
