"""Samplers with other orders: by weight, and by length."""

from __future__ import annotations

import zlib
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.groups import Ranks
from parallel.samplers.distributed import DistributedSampler
from parallel.samplers.order import LengthGrouped, Order, WeightedDraws
from parallel.samplers.permutation import Permutation, derive
from transport.checks import to_whole_number

_BLOCK = 1 << 20  # numbers of which a checksum is computed at a time


class WeightedDistributedSampler(DistributedSampler):
    """Draws samples with replacement, sample i with probability proportional to ``weights[i]``.

    Args:
        weights: finite numbers >= 0, not all 0; one for each sample.
        num_samples: how many are drawn an epoch, over all replicas; as many as weights by default.

    The rest is ``DistributedSampler``'s: shares, epochs, and a state that resumes the same draws on
    any number of replicas.
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
        mesh: Ranks | None = None,
    ) -> None:
        given = np.asarray(weights, np.float64)
        if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any() or not given.any():
            raise ValueError(
                "weights must be a sequence of finite numbers >= 0 that are not all 0, got "
                f"{given.size} values of shape {list(given.shape)}"
            )
        self._cumulative = np.cumsum(given)
        super().__init__(
            given.size if num_samples is None else num_samples,
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
        """Return what the draws depend on, a checksum of the weights among it."""
        return {**super().order_options(), "weights": self._checksum}

    def order(self, epoch: int) -> Order:
        """Return the epoch's draws."""
        return WeightedDraws(self._cumulative, derive(self.seed, epoch))


class LengthGroupedSampler(DistributedSampler):
    """Shuffles so that samples of similar length come together, on all replicas alike.

    The shuffled order is cut into windows of ``group_size`` places, and each is sorted by length:
    the samples that the replicas use in one step, and those of one batch, have nearly equal
    lengths. About 50 times the batch over all replicas is a good group size: larger means less
    padding, smaller more chance.

    Args:
        lengths: of each sample; any numbers.
        group_size: the places in a window, at least 1.

    The rest is ``DistributedSampler``'s.
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
        mesh: Ranks | None = None,
    ) -> None:
        self._lengths = np.asarray(lengths)
        if self._lengths.ndim != 1:
            raise ValueError(
                f"lengths must be one number a sample, got shape {list(self._lengths.shape)}"
            )
        group_size = to_whole_number(group_size, "group_size")
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self.group_size = group_size
        super().__init__(
            self._lengths, num_replicas, rank, seed=seed, drop_last=drop_last, mesh=mesh
        )

    @cached_property
    def _checksum(self) -> str:
        return _checksum_of(self._lengths)

    def order_options(self) -> dict[str, Any]:
        """Return what the order depends on, a checksum of the lengths among it."""
        return {
            **super().order_options(),
            "group_size": self.group_size,
            "lengths": self._checksum,
        }

    def order(self, epoch: int) -> Order:
        """Return the epoch's order."""
        shuffled = Permutation(self.size, derive(self.seed, epoch))
        return LengthGrouped(shuffled, self._lengths, self.group_size)


def _checksum_of(values: npt.NDArray[Any]) -> str:
    """Return the CRC-32 of numbers as float64, whatever their dtype, a block at a time."""
    checksum = 0
    for begin in range(0, len(values), _BLOCK):
        block = np.ascontiguousarray(values[begin : begin + _BLOCK], "<f8")
        checksum = zlib.crc32(block.tobytes(), checksum)
    return f"CRC-32 {checksum:08x}"
