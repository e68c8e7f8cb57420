"""The arrays of a pipeline's stages, as a tree of global arrays that is the same on all ranks.

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
    """An array's description for other ranks; ``dims`` has the mesh dims that split each dim."""

    dims: _Dims
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class StageArrays:
    """A tree of the arrays of all stages along ``dim`` of ``mesh``.

    ``mesh`` has the ranks of all stages. With only one stage the tree has the same form. Raises
    MeshDimError for a mesh without ``dim``.
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
        """Return the merged sections of all stages' ``own``. A collective.

        ``own`` has this stage's sections. Each maps paths, which no other stage has, to DArrays,
        arrays and other values. The mesh dims that split DArrays have the same names in ``mesh``.
        Arrays are not copied.
        """
        descriptions = map_leaves(_description, own)
        state: dict[str, dict[str, Any]] = {section: {} for section in own}
        for stage, described in enumerate(gathered(descriptions, self._pipeline)):
            mesh = self._stages[stage]
            values = own if stage == self._pipeline.rank() else described
            merged = map_leaves(partial(_global_array, mesh), described, values)
            for section, entries in state.items():
                entries.update(merged[section])
        return state

    def layout(self, own: Mapping[str, Any]) -> dict[str, Sharding]:
        """Return the shardings of the arrays in all stages' ``own``, by path. A collective."""
        descriptions = {path: _description(path, value) for path, value in own.items()}
        return {
            path: Sharding(self._stages[stage], P(*leaf.dims))
            for stage, described in enumerate(gathered(descriptions, self._pipeline))
            for path, leaf in described.items()
            if isinstance(leaf, _ArrayDescription)
        }


def _description(_: str, value: Any) -> Any:
    """Return the description of an array, or any other value itself."""
    if not isinstance(value, DArray):
        return (
            _ArrayDescription((), tuple(value.shape), np.dtype(value.dtype))
            if is_array(value)
            else value
        )
    names = value.sharding.mesh.mesh_dim_names or ()
    dims = tuple(tuple(names[i] for i in dim) for dim in value.sharding.dims)
    return _ArrayDescription(dims, tuple(value.shape), np.dtype(value.dtype))


def _global_array(mesh: DeviceMesh, _: str, leaf: Any, own: Any) -> Any:
    """Return a DArray on the stage's ranks for an array's description, or any other ``leaf``.

    ``own`` is this rank's array, or ``leaf`` itself if another stage has the array.
    """
    if not isinstance(leaf, _ArrayDescription):
        return leaf
    local = own.local if isinstance(own, DArray) else None if own is leaf else own
    return DArray(local, Sharding(mesh, P(*leaf.dims)), leaf.shape, leaf.dtype)
