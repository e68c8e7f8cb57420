"""The plan from one sharding to another, within a mesh or from one mesh to another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.sharding._redistribution.across import steps_across
from meshlib.sharding._redistribution.search import steps_within
from meshlib.sharding._redistribution.steps import Plan
from meshlib.sharding._sharding_value import ShardingValue


def plan(
    source: ShardingValue, target: ShardingValue, shape: Sequence[int], dtype: npt.DTypeLike = float
) -> Plan:
    """Return the plan for an array of ``shape`` and ``dtype``; see ``Plan``.

    Raises ValueError for a shape with fewer dims than either spec, and for two meshes if one is a
    slice of a larger mesh. Raises TypeError for a target that is not a Sharding.
    """
    if not isinstance(target, ShardingValue):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"the target is {target!r}; expected a Sharding")
    lengths = tuple(source.check_shape(shape))
    target.check_shape(shape)
    return _plan(source, target, lengths, np.dtype(dtype))


@lru_cache(maxsize=1024)
def _plan(
    source: ShardingValue, target: ShardingValue, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Plan:
    within = source.mesh == target.mesh
    steps = (steps_within if within else steps_across)(source, target, shape, dtype.itemsize)
    return Plan(source, target, shape, dtype, tuple(steps))
