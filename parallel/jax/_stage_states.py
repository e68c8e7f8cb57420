"""The state of JAX training on a mesh, as one tree of global arrays: for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlib import DeviceMesh
from meshlib.sharding import DArray, P, Sharding
from parallel._core.pipeline.stage_arrays import StageArrays
from parallel.jax import _fsdp as fsdp
from parallel.jax._parallelize import SplitWeight
from parallel.jax._paths import path_of

Tree = Any


class StageStates:
    """The global state of a pytree of which each rank has its stages' parts.

        states = StageStates(mesh)
        checkpoints.save(states.state((params, optimizer_state)), step=100)
        loaded = checkpoints.load(states.layout((params, optimizer_state)))
        params, optimizer_state = states.restore((params, optimizer_state), loaded)

    Arrays go by their paths, which no two stages share; ``parallelize`` and ``fsdp.shard`` say in
    the tree how they are split. So a state loads on any other mesh. All ranks call all methods, not
    inside ``jit``.

    Args:
        mesh: all ranks, with names.
        dim: the dim along which the stages lie. A mesh of which it has one rank has one stage.

    Raises:
        MeshDimError: for a mesh that has no such dim.
    """

    def __init__(self, mesh: DeviceMesh, dim: str = "pp") -> None:
        self._arrays = StageArrays(mesh, dim)

    def state(self, tree: Tree) -> dict[str, Any]:
        """Return ``{path: DArray}`` of all stages' trees, and numbers for arrays without dims."""
        return self._arrays.state({"": self._own(tree)})[""]

    def layout(self, tree: Tree) -> dict[str, Any]:
        """Return what ``meshlib.checkpoint.load`` is to make of such a state: its ``like``."""
        own = self._own(tree)
        numbers = {path: ... for path, value in own.items() if not isinstance(value, DArray)}
        return {**numbers, **self._arrays.layout(own)}

    def restore(self, tree: Tree, state: Mapping[str, Any]) -> Tree:
        """Return ``tree`` with the values of ``state``, which was loaded as ``layout`` says.

        Raises KeyError for a path that it lacks.
        """

        def value(path: Any, leaf: Any) -> Any:
            loaded = state[path_of(path)]
            local = loaded.local if isinstance(loaded, DArray) else loaded
            return jnp.asarray(local, jnp.result_type(leaf))

        return jax.tree_util.tree_map_with_path(value, tree)

    def _own(self, tree: Tree) -> dict[str, Any]:
        own: dict[str, Any] = {}
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        nodes = jax.tree_util.tree_leaves(tree, is_leaf=is_split)
        for (path, leaf), node in zip(leaves, nodes, strict=True):
            _, axes = split_of(node)
            local, name = np.asarray(leaf), path_of(path)
            if not local.ndim:
                own[name] = local.item()
                continue
            dims = P(*(axes.get(axis, ()) for axis in range(local.ndim)))
            own[name] = DArray(local, Sharding(self._arrays.own, dims), node.shape, local.dtype)
        return own


def is_split(node: Any) -> bool:
    """Whether a node of a tree says how its array is split: for ``is_leaf`` of ``jax.tree.map``."""
    return isinstance(node, SplitWeight | fsdp.Part)


def split_of(node: Any) -> tuple[Any, dict[int, tuple[str, ...]]]:
    """Return this rank's array of a node of a tree, and over which mesh dims its axes are split.

    The outermost dim of the mesh comes first. A leaf that is no such node is not split.
    """
    if isinstance(node, SplitWeight):
        array, inner = split_of(node.array)
        own = {node.axis % array.ndim: tuple(node.mesh.mesh_dim_names or ())}
    elif isinstance(node, fsdp.Part):
        array, inner, axis = node.array, {}, node.split.axis
        own = {} if axis is None else {axis % array.ndim: node.split.shards.mesh_dim_names or ()}
    else:
        return node, {}
    return array, {axis: own.get(axis, ()) + inner.get(axis, ()) for axis in {**own, **inner}}
