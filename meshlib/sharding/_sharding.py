"""``Sharding``: how a global array lies on a mesh, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy.typing as npt

from meshlib.sharding._redistribution.plan import plan
from meshlib.sharding._redistribution.steps import Plan
from meshlib.sharding._sharding_value import ShardingValue


@final
class Sharding(ShardingValue):
    """How a global array of any shape lies on ``mesh``: an immutable value, the same on each rank.

    ``spec`` is JAX's, ``P("dp", None, ("cp", "tp"))``: for each array dim the mesh dims that split
    it, the outermost first, so that ``("cp", "tp")`` and ``("tp", "cp")`` differ. Or it is torch's,
    ``[Shard(0), Replicate(), Partial("sum")]``: a placement for each mesh dim. Along mesh dims that
    it does not name the array is replicated. ``partial`` has the mesh dims along which values are
    still to be reduced: ``{"tp": "max"}``, or ``"tp"``, ``("tp", "cp")`` for sums.

    Flattened names stand for their dims. Equal, hashed and pickled by value, however it was
    written; it needs no job. Raises MeshDimError for a mesh dim that is not there, ValueError for
    one named twice and for ops that cannot be partial together, TypeError for what is no mesh or
    spec.

    Parts are made by ceiling division: of 5 rows on 4 ranks they are 2, 2, 1, 0; a dim that several
    mesh dims split is split by the first, and each part by the next.
    """

    __slots__ = ()

    def plan(self, to: Sharding, shape: Sequence[int], dtype: npt.DTypeLike = float) -> Plan:
        """Return how an array of ``shape`` gets from this sharding to ``to``; see ``Plan``."""
        return plan(self, to, shape, dtype)
