"""Samplers with other orders: weighted draws, and grouping by length."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel._arrays import is_floating
from parallel._checks import describe, to_count
from parallel._groups import GroupLike
from parallel.samplers._distributed import DistributedSampler
from parallel.samplers._orders import LengthGrouped, Order, Permutation, WeightedDraws, derive

_BLOCK = 1 << 20  # numbers per step of a checksum


class WeightedDistributedSampler(DistributedSampler):
    """Draws samples with replacement, sample i with probability proportional to ``weights[i]``.

    Args:
        weights: Finite numbers >= 0, not all 0; one for each sample.
        num_samples: The number of draws per epoch, over all replicas; by default one per weight.
        num_replicas: The number of ranks that share the samples; by default the default group's
            size.
        rank: This replica, in [0, num_replicas); by default the default group's rank.
        seed: The draws' seed; equal on all replicas.
        drop_last: Omit the last draws instead of repeating the first.
        mesh: The replicas, instead of the two numbers.

    Shares and epochs are the same as with a ``DistributedSampler``. The state resumes the same
    draws on any number of replicas.

    Raises:
        ValueError: For other weights or no samples, and the errors of ``DistributedSampler``.
        TypeError: For arguments of another type.
    """

    def __init__(
        self,
        weights: npt.ArrayLike,
        num_samples: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        mesh: GroupLike | None = None,
    ) -> None:
        values = _numbers(weights, "weights").astype(np.float64)
        bad = np.argwhere(~(np.isfinite(values) & (values >= 0))).tolist()
        if values.ndim != 1 or bad or not values.any():
            which = f", weights{bad[0]} being {values[tuple(bad[0])]}" if bad else ""
            raise ValueError(
                "weights must be a sequence of finite numbers >= 0 that are not all 0, got "
                f"{values.size} values of shape {list(values.shape)}{which}"
            )
        self._cumulative = np.cumsum(values)
        if num_samples is not None:
            num_samples = to_count(num_samples, "num_samples")
        super().__init__(
            values.size if num_samples is None else num_samples,
            num_replicas,
            rank,
            shuffle=True,
            seed=seed,
            drop_last=drop_last,
            mesh=mesh,
        )

    @cached_property
    def _checksum(self) -> str:
        return _checksum_of(self._cumulative)

    def order_options(self) -> dict[str, Any]:
        return {**super().order_options(), "weights": self._checksum}

    def order(self, epoch: int) -> Order:
        return WeightedDraws(self._cumulative, derive(self.seed, epoch))


class LengthGroupedSampler(DistributedSampler):
    """Shuffles samples, but keeps samples of similar length together.

    The shuffled order is cut into windows of ``group_size`` places, each sorted by length. So the
    samples of one step, over all replicas, have nearly equal lengths. About 50 times the global
    batch is a good group size. A larger one means less padding; a smaller one, more randomness.

    Args:
        lengths: The length of each sample, as any numbers.
        group_size: The number of places in a window, at least 1.
        num_replicas: The number of ranks that share the samples; by default the default group's
            size.
        rank: This replica, in [0, num_replicas); by default the default group's rank.
        seed: The permutation's seed; equal on all replicas.
        drop_last: Omit the last samples instead of repeating the first.
        mesh: The replicas, instead of the two numbers.

    Shares, epochs and state are the same as with a ``DistributedSampler``.

    Raises:
        ValueError: If lengths are not a vector, for a group_size below 1, and the errors of
            ``DistributedSampler``.
        TypeError: If lengths are not numbers, and for other arguments of the wrong type.
    """

    def __init__(
        self,
        lengths: SequenceOf[float] | npt.NDArray[np.generic],
        group_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        seed: int = 0,
        drop_last: bool = False,
        mesh: GroupLike | None = None,
    ) -> None:
        self._lengths = _numbers(lengths, "lengths")
        if self._lengths.ndim != 1:
            raise ValueError(
                f"lengths must be one number per sample, got shape {list(self._lengths.shape)}"
            )
        self.group_size: int = to_count(group_size, "group_size")
        super().__init__(
            self._lengths, num_replicas, rank, seed=seed, drop_last=drop_last, mesh=mesh
        )

    @cached_property
    def _checksum(self) -> str:
        return _checksum_of(self._lengths)

    def order_options(self) -> dict[str, Any]:
        return {
            **super().order_options(),
            "group_size": self.group_size,
            "lengths": self._checksum,
        }

    def order(self, epoch: int) -> Order:
        shuffled = Permutation(self.size, derive(self.seed, epoch))
        return LengthGrouped(shuffled, self._lengths, self.group_size)


def _numbers(values: Any, name: str) -> npt.NDArray[Any]:
    """Return ``values`` as an array; raise TypeError, naming ``name``, unless these are numbers."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = None
    if array is None or not (array.dtype.kind in "biu" or is_floating(array.dtype)):
        kind = f" and dtype {values.dtype.name}" if isinstance(values, np.ndarray) else ""
        raise TypeError(f"{name} must be a sequence of numbers, got {describe(values)}{kind}")
    return array


def _checksum_of(values: npt.NDArray[Any]) -> str:
    """Return the CRC-32 of numbers of any dtype, converted to float64 block by block."""
    checksum = 0
    for begin in range(0, len(values), _BLOCK):
        block = np.ascontiguousarray(values[begin : begin + _BLOCK], "<f8")
        checksum = zlib.crc32(block.tobytes(), checksum)
    return f"CRC-32 {checksum:08x}"
