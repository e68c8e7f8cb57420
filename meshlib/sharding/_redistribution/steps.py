"""The plan of a redistribution: ``Plan``, a list of steps with their bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshlib._mesh.spec import describe_dims
from meshlib._mesh.value import described_ranks
from meshlib._plain_text import binary_size, columns
from meshlib.sharding._blocks import shared_elements
from meshlib.sharding._sharding_value import ShardingValue

SLICE, PARTITION = "slice", "partition"
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"
REDUCE_SCATTER, ALL_REDUCE = "reduce_scatter", "all_reduce"
POINT_TO_POINT = "point_to_point"
LOCAL = frozenset({SLICE, PARTITION})
"""The kinds of step that send nothing."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One step of a plan, from ``source`` to ``target``.

    ``kind`` is a collective's name, ``"point_to_point"`` (from one mesh to another), ``"slice"`` or
    ``"partition"``. The last two send nothing. In a slice, each rank keeps a part of its array. In
    a partition, one rank along each mesh dim keeps the value, and the others get the op's neutral
    element.

    The step goes over the mesh dims numbered ``mesh_dims``, and reduces with ``op``. All ranks
    together receive ``wire_bytes`` from others. For an all_reduce over n ranks, that is a ring's
    2 (n-1)/n of the bytes which all ranks hold.
    """

    kind: str
    source: ShardingValue
    target: ShardingValue
    mesh_dims: tuple[int, ...] = ()
    op: str | None = None
    wire_bytes: int = 0

    @property
    def is_local(self) -> bool:
        """True if the step sends nothing."""
        return self.kind in LOCAL

    @property
    def over(self) -> str:
        """The mesh dims as ``dp=2 × tp=2``; for point to point, the ranks of both meshes."""
        mesh = self.source.mesh
        if self.kind == POINT_TO_POINT:
            return f"{_ranks(self.source)} to {_ranks(self.target)}"
        names = mesh.mesh_dim_names or (None,) * mesh.ndim
        dims = self.mesh_dims
        return describe_dims([names[i] for i in dims], [mesh.shape[i] for i in dims])


@dataclass(frozen=True, slots=True)
class Plan:
    """A redistribution of an array of ``shape`` from ``source`` to ``target``, in ``steps``.

    Of the considered paths it has the fewest bytes on the wire, then the fewest collectives, then
    the fewest messages. Every rank computes the same plan, without communication or a job.
    """

    source: ShardingValue
    target: ShardingValue
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    steps: tuple[PlanStep, ...]

    @property
    def wire_bytes(self) -> int:
        """The bytes that all ranks together receive from others."""
        return sum(step.wire_bytes for step in self.steps)

    def __str__(self) -> str:
        """Return a line for the whole and one for each step."""
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        head = (
            f"{self.dtype} {self.shape}, {binary_size(nbytes)}: {self.source.described()} on"
            f" {self.source.mesh.described()} -> {self.target.described()}"
        )
        if self.target.mesh != self.source.mesh:
            head += f" on {self.target.mesh.described()}"
        rows = [
            [f"  {i}. {step.kind}", _over(step), f"-> {step.target.described()}", _cost(step)]
            for i, step in enumerate(self.steps, 1)
        ]
        if not rows:
            return f"{head}\n  nothing to do"
        total = f"  on the wire: {binary_size(self.wire_bytes)}"
        return "\n".join([head, *columns(rows), total])


def held_bytes(sharding: ShardingValue, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that all ranks together hold."""
    return held_in_both(sharding, sharding, shape, itemsize)


def held_in_both(a: ShardingValue, b: ShardingValue, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes that a rank holds in both of two shardings of a mesh, summed over ranks."""
    dims = range(len(shape))
    left, right = ([s.split_of(i) for i in dims] for s in (a, b))
    return itemsize * shared_elements(shape, a.mesh.shape, left, right)


def _ranks(sharding: ShardingValue) -> str:
    return f"ranks {described_ranks(sharding.mesh)}"


def _over(step: PlanStep) -> str:
    if step.kind == POINT_TO_POINT:
        return step.over
    op = "" if step.op is None else f"{step.op} "
    return f"{op}over {step.over}"


def _cost(step: PlanStep) -> str:
    if step.is_local:
        return "nothing sent"
    each = step.wire_bytes / max(step.target.mesh.size(), 1)
    return f"{binary_size(step.wire_bytes)}, {binary_size(each)} a rank"
