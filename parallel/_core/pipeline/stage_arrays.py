"""The arrays of a pipeline's stages, as one tree of global arrays that all ranks have.

Each stage's arrays are on its ranks only; a checkpoint wants the same tree on all of them. So each
rank learns what the other stages have, and stands for it with DArrays of which it has no part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshlib import DeviceMesh
from meshlib.sharding import DArray, P, Sharding
from parallel._arrays import is_array
from parallel._groups import gathered
from parallel._nested import map_leaves

_Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _ArrayDescription:
    """An array's description for other ranks: the split of its dims, by names of mesh dims."""

    dims: _Dims
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class StageArrays:
    """Makes one tree of the stages' along ``dim`` of ``mesh``, which has all their ranks.

    A pipeline of one stage is none, and has the same tree. Raises MeshDimError for a mesh that has
    no such dim.
    """

    def __init__(self, mesh: DeviceMesh, dim: str) -> None:
        self._pipeline = mesh[dim].process_group
        names = mesh.mesh_dim_names or ()
        others = [name for name in names if name != dim]
        ranks = mesh.permute(dim, *others).mesh
        self._stages = [
            DeviceMesh(
                mesh.device_type,
                ranks[stage] if others else ranks[stage : stage + 1],
                mesh_dim_names=tuple(others) or (dim,),
            )
            for stage in range(len(ranks))
        ]

    @property
    def own(self) -> DeviceMesh:
        """The ranks of this rank's stage."""
        return self._stages[self._pipeline.rank()]

    def state(self, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the entries of all stages' ``own``, section by section. A collective.

        ``own`` are this stage's sections of DArrays, arrays and other values, by paths that no
        other stage has. The dims over which DArrays are split have the names of the mesh. Arrays
        are not copied.
        """
        told = map_leaves(_told, own)
        state: dict[str, dict[str, Any]] = {section: {} for section in own}
        for stage, theirs in enumerate(gathered(told, self._pipeline)):
            mesh = self._stages[stage]
            mine = own if stage == self._pipeline.rank() else theirs
            whole = map_leaves(partial(_standing_for, mesh), theirs, mine)
            for section, entries in state.items():
                entries.update(whole[section])
        return state

    def layout(self, own: Mapping[str, Any]) -> dict[str, Sharding]:
        """Return how the arrays of all stages' ``own`` lie, by path. A collective."""
        told = {path: _told(path, value) for path, value in own.items()}
        return {
            path: Sharding(self._stages[stage], P(*leaf.dims))
            for stage, theirs in enumerate(gathered(told, self._pipeline))
            for path, leaf in theirs.items()
            if isinstance(leaf, _ArrayDescription)
        }


def _told(_: str, value: Any) -> Any:
    if not isinstance(value, DArray):
        return (
            _ArrayDescription((), tuple(value.shape), np.dtype(value.dtype))
            if is_array(value)
            else value
        )
    names = value.sharding.mesh.mesh_dim_names or ()
    dims = tuple(tuple(names[i] for i in dim) for dim in value.sharding.dims)
    return _ArrayDescription(dims, tuple(value.shape), np.dtype(value.dtype))


def _standing_for(mesh: DeviceMesh, _: str, leaf: Any, own: Any) -> Any:
    """Return a value as all ranks have it: for an array a DArray on the ranks of its stage.

    ``own`` is this rank's array, or ``leaf`` itself where it has none.
    """
    if not isinstance(leaf, _ArrayDescription):
        return leaf
    local = own.local if isinstance(own, DArray) else None if own is leaf else own
    return DArray(local, Sharding(mesh, P(*leaf.dims)), leaf.shape, leaf.dtype)
