"""The arrays of a pipeline's stages, as one tree of global arrays that all ranks have.

Each stage's arrays are on its ranks only, but a checkpoint needs the same tree on all ranks. So the
ranks exchange descriptions of their arrays, and represent other stages' arrays by DArrays without
local parts.
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
    """Joins the arrays of the stages along ``dim`` of ``mesh`` into one tree.

    ``mesh`` has the ranks of all stages. The tree has the same form if there is one stage only.
    Raises MeshDimError for a mesh without ``dim``.
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

        ``own`` has this stage's sections. Each maps paths, which no other stage has, to DArrays,
        arrays and other values. DArrays are split over dims that have their names in the mesh.
        Arrays are not copied.
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
        """Return the shardings of the arrays in all stages' ``own``, by path. A collective."""
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
    """Return ``leaf``, or for an array's description a DArray on the ranks of its stage.

    ``own`` is this rank's array, or ``leaf`` itself if another stage has the array.
    """
    if not isinstance(leaf, _ArrayDescription):
        return leaf
    local = own.local if isinstance(own, DArray) else None if own is leaf else own
    return DArray(local, Sharding(mesh, P(*leaf.dims)), leaf.shape, leaf.dtype)
