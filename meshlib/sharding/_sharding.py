"""``Sharding``: the distribution of a global array over a mesh, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy.typing as npt

from meshlib.sharding._redistribution.plan import plan
from meshlib.sharding._redistribution.steps import Plan
from meshlib.sharding._sharding_value import ShardingValue


@final
class Sharding(ShardingValue):
    """The distribution of a global array over ``mesh``: immutable, and equal on all ranks.

    ``spec`` may be JAX's, ``P("dp", None, ("cp", "tp"))``: for each array dim the mesh dims that
    split it, the outermost first. So ``("cp", "tp")`` and ``("tp", "cp")`` differ. Or it may be
    torch's, ``[Shard(0), Replicate(), Partial("sum")]``: a placement for each mesh dim. Mesh dims
    that ``spec`` does not name replicate the array. ``partial`` has the mesh dims along which
    values still have to be reduced: ``{"tp": "max"}``, or ``"tp"``, ``("tp", "cp")`` for sums.

    Flattened names stand for their dims. Shardings are equal, hashed and pickled by value, and need
    no job. Raises MeshDimError for an unknown mesh dim. Raises ValueError for a mesh dim that is
    named twice, and for ops that cannot be partial together. Raises TypeError for a wrong ``mesh``
    or ``spec``.

    Parts come from ceiling division: 5 rows on 4 ranks are 2, 2, 1, 0. If several mesh dims split
    an array dim, the first splits it, and the next splits each part.
    """

    __slots__ = ()

    def plan(self, to: Sharding, shape: Sequence[int], dtype: npt.DTypeLike = float) -> Plan:
        """Return the plan that redistributes an array of ``shape`` from this sharding to ``to``."""
        return plan(self, to, shape, dtype)
