"""The state of a model whose stages lie on different ranks, as one tree of global arrays.

Each stage's arrays are on its ranks only; a checkpoint wants the same tree on all of them. So each
rank learns what the other stages have, and stands for it with DArrays of which it has no part.
Names are paths in the whole model, and states of an optimizer go by the path of their parameter: so
a checkpoint loads on any other number of stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from meshlib import DeviceMesh
from meshlib.sharding import DArray, P, Sharding
from parallel.arrays import is_array
from parallel.groups import gathered
from parallel.nested import map_leaves
from parallel.nn.global_part import as_global
from parallel.nn.module import Module
from parallel.optim.optimizer import Optimizer

_Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Leaf:
    """What other ranks need to know of an array: how its dims are split, by names of mesh dims."""

    dims: _Dims
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class StageStates:
    """The global state of ``model``, a stage of a pipeline, and its ``optimizer``.

        states = StageStates(stage, optimizer, mesh)
        checkpoints.save(states.state(), step=100)
        states.restore(checkpoints.load(states.layout()))

    ``state`` is a collective over the ranks along ``dim``. A pipeline of one stage is none, and has
    the same tree.

    Args:
        model: this rank's stage, whose parameters have the paths that they have in the whole model;
            no two stages have the same.
        optimizer: that of its parameters.
        mesh: all ranks of the pipeline and its replicas, with names; parameters are split over
            some of its dims, or not at all.
        dim: the dim along which the stages lie.

    Raises:
        MeshDimError: for a mesh that has no such dim.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, mesh: DeviceMesh, dim: str = "pp"
    ) -> None:
        self._model, self._optimizer = model, optimizer
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

    def state(self) -> dict[str, Any]:
        """Return ``{"model": {path: DArray}, "optimizer": {path: {name: value}}}`` of all stages.

        Arrays are not copied. All ranks call.
        """
        model, optimizer = self._own()
        own = {"model": model, "optimizer": optimizer}
        told = map_leaves(_told, own)
        state: dict[str, Any] = {"model": {}, "optimizer": {}}
        for stage, theirs in enumerate(gathered(told, self._pipeline)):
            mesh = self._stages[stage]
            mine = own if stage == self._pipeline.rank() else theirs
            whole = map_leaves(partial(_standing_for, mesh), theirs, mine)
            for part, entries in state.items():
                entries.update(whole[part])
        return state

    def layout(self) -> dict[str, Any]:
        """Return what ``meshlib.checkpoint.load`` is to make of such a state: its ``like``.

        All ranks call. The optimizer need not have made a step.
        """
        own, _ = self._own()
        told = {path: _leaf(value) for path, value in own.items()}
        known: dict[str, tuple[_Leaf, DeviceMesh]] = {}
        for stage, theirs in enumerate(gathered(told, self._pipeline)):
            known |= {path: (leaf, self._stages[stage]) for path, leaf in theirs.items()}

        def like(keys: tuple[Any, ...], shape: tuple[int, ...]) -> Any:
            leaf, mesh = known.get(keys[0], (None, None))
            if leaf is None or mesh is None or leaf.shape != shape:
                return ...  # a count of steps
            return Sharding(mesh, P(*leaf.dims))

        model = {path: Sharding(mesh, P(*leaf.dims)) for path, (leaf, mesh) in known.items()}
        return {"model": model, "optimizer": like}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Copy what was loaded, in the layout of ``layout``, into the stage and its optimizer.

        What the optimizer kept before goes, also where nothing was saved. Raises KeyError for a
        state that lacks something, when nothing is changed; ValueError for one that does not fit.
        """
        own = self._model.state_dict()
        arrays = {path: _as(value, state["model"][path]) for path, value in own.items()}
        saved = state["optimizer"]
        kept = {
            parameter: {
                name: value.local.copy() if isinstance(value, DArray) else value
                for name, value in saved[path].items()
            }
            for path, parameter in self._model.named_parameters()
            if path in saved
        }
        self._model.load_state_dict(arrays)
        self._optimizer.state = kept

    # ------------------------------------------------------------------ what there is

    def _own(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return this stage's arrays and the states of its parameters, by path, as global ones."""
        parameters = dict(self._model.named_parameters())
        model = {
            path: as_global(parameters[path], value) if path in parameters else value
            for path, value in self._model.state_dict().items()
        }
        optimizer = {
            path: {
                name: as_global(parameter, value)
                for name, value in self._optimizer.state[parameter].items()
            }
            for path, parameter in parameters.items()
            if parameter in self._optimizer.state
        }
        return model, optimizer


def _told(_: str, value: Any) -> Any:
    return _leaf(value) if isinstance(value, DArray) or is_array(value) else value


def _leaf(value: Any) -> _Leaf:
    shape = tuple(value.shape)
    if not isinstance(value, DArray):
        return _Leaf((), shape, np.dtype(value.dtype))
    names = value.sharding.mesh.mesh_dim_names or ()
    dims = tuple(tuple(names[i] for i in dim) for dim in value.sharding.dims)
    return _Leaf(dims, shape, np.dtype(value.dtype))


def _standing_for(mesh: DeviceMesh, _: str, leaf: Any, own: Any) -> Any:
    """Return a value as all ranks have it: for an array a DArray on the ranks of its stage.

    ``own`` is this rank's array, or ``leaf`` itself where it has none.
    """
    if not isinstance(leaf, _Leaf):
        return leaf
    local = own.local if isinstance(own, DArray) else None if own is leaf else own
    return DArray(local, Sharding(mesh, P(*leaf.dims)), leaf.shape, leaf.dtype)


def _as(own: Any, loaded: Any) -> Any:
    """Return what was loaded in the form in which the stage has it: the parts are the same."""
    if isinstance(own, DArray):
        return DArray(loaded.local, own.sharding, own.shape, own.dtype)
    return loaded.local
