"""All buckets of a reducer: how they are made, and made anew."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from meshlib import ProcessGroup
from parallel._arrays import Array
from parallel._core.assignment import assign_buckets
from parallel._core.buckets import Bucket
from parallel._core.gradients import GradientSpec


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How gradients are bucketed, and which parameters may go unused."""

    first_bytes: int
    cap_bytes: int
    in_place_bytes: int | None = None
    """Gradients of at least this size are reduced in their own memory, each in its own bucket."""
    find_unused_parameters: bool = False
    static_graph: bool = False
    symmetric_memory: bool = False
    """Buckets are in the group's symmetric memory: they are reduced without a copy. Making buckets
    is a collective then."""


class BucketSet:
    """The buckets of the gradients ``specs``: ``all`` of them, in the order of reduction.

    ``where`` has each gradient's bucket, by the gradient's number: its place in ``specs``.
    """

    def __init__(
        self, specs: Sequence[GradientSpec], group: ProcessGroup, options: ReducerOptions
    ) -> None:
        self._specs = specs
        self._group = group
        self._options = options
        self.all: list[Bucket] = []
        self.where: dict[int, Bucket] = {}

    def build(self, order: Sequence[int]) -> None:
        """Make buckets for the gradients ``order``: their numbers, as they are expected.

        What error feedback keeps is kept. A collective where buckets are in symmetric memory.
        """
        group = self._group if self._options.symmetric_memory else None
        compression = self._group.compression
        known = self.residuals()
        self.all = [
            Bucket(
                index,
                numbers,
                [self._specs[number] for number in numbers],
                group,
                borrowed=self._in_place(numbers[0]),
            )
            for index, numbers in enumerate(self._assign(order))
        ]
        if compression is not None and compression.error_feedback:
            for bucket in self.all:
                if bucket.specs[0].library is np:
                    bucket.keep_residual(known)
        self.where = {number: bucket for bucket in self.all for number in bucket.numbers}

    def agree(self, order: Sequence[int]) -> list[int]:
        """Return group rank 0's ``order``: gradients may have come in another one elsewhere."""
        numbers = self._specs[0].library.asarray(order, dtype="int64")
        self._group.broadcast(numbers, group_src=0)
        return numbers.tolist()

    def residuals(self) -> dict[int, Array]:
        """Return what error feedback keeps for the next reduction, by the gradients' numbers."""
        return {n: part for bucket in self.all for n, part in bucket.residuals().items()}

    def _assign(self, order: Sequence[int]) -> list[list[int]]:
        options, sizes = self._options, [spec.nbytes for spec in self._specs]
        keys: list[Hashable] = [
            (spec.placement, number if self._in_place(number) else None)
            for number, spec in enumerate(self._specs)
        ]
        groups = assign_buckets(order, sizes, keys, options.first_bytes, options.cap_bytes)
        # A bucket of small gradients from all over the model is complete late. Before the end,
        # large ones that are complete would wait for it.
        least = options.in_place_bytes or 0
        return sorted(groups, key=lambda numbers: sum(sizes[n] for n in numbers) < least)

    def _in_place(self, number: int) -> bool:
        least = self._options.in_place_bytes
        return least is not None and self._specs[number].nbytes >= least
