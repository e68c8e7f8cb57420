"""Fully sharded data parallelism inside ``jax.jit``, as functions on pytrees.

    parts = fsdp.shard(params, mesh["dp_shard"])

    def loss(parts, batch):
        x = fsdp.gather(parts["embedding"])[batch.tokens]
        for block in parts["blocks"]:
            x = fsdp.layer(apply_block)(block, x)
        ...

    value, grads = jax.value_and_grad(loss)(parts, batch)

Each array becomes a ``ShardedArray``, a pytree node that holds this rank's rows. ``gather`` returns
the whole arrays; its derivative is this rank's rows of the gradient, averaged over all ranks.
Optax, ``jax.grad``, ``jax.lax.scan`` and ``jax.checkpoint`` accept trees of parts like other trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from meshlib import DArray, DeviceMesh, Sharding, jit
from parallel._checks import to_floating
from parallel._core.replicas import raise_on_all_ranks
from parallel._groups import check_shard_mesh
from parallel.jax._gathering import Split, gather_arrays, save_results
from parallel.jax._static import register_node
from parallel.jax._tensor_parallel import SplitWeight, SummedParameter
from parallel.jax._trees import (
    TreeOfParameters,
    check_same_tree,
    is_trained,
    leaves_below,
    map_nodes,
    path_of,
)

__all__ = [
    "ShardedArray",
    "ShardedLayer",
    "Split",
    "from_global",
    "gather",
    "global_norm",
    "layer",
    "save_results",
    "shard",
    "to_global",
    "unshard",
]

Tree = Any


@register_node("split")
@dataclass(frozen=True)
class ShardedArray:
    """This rank's part of an array: a pytree node whose only leaf is ``array``."""

    array: Any
    split: Split

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.split.whole_shape(self.array.shape)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=[])
@dataclass(frozen=True)
class ShardedLayer:
    """A sharded layer: a call gathers its ``parts`` and calls the whole layer."""

    parts: Tree

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the layer's result."""

        def call(whole: Any, *inputs: Any, **options: Any) -> Any:
            return whole(*inputs, **options)

        return layer(call)(self.parts, *inputs, **options)


def is_split(node: Any) -> bool:
    """True for a pytree node that ``shard`` or ``parallelize`` made; for use as ``is_leaf``."""
    return isinstance(node, ShardedArray | SplitWeight)


def split_over(node: ShardedArray | SplitWeight) -> tuple[DeviceMesh, ...]:
    """Return the mesh over which a node's array is split, if any."""
    if isinstance(node, SplitWeight):
        return (node.mesh,)
    return () if node.split.axis is None else (node.split.shards,)


def is_part(node: Any) -> bool:
    """True for a ``ShardedArray``; for use as ``is_leaf`` of ``jax.tree.map``."""
    return isinstance(node, ShardedArray)


def _is_gathered_apart(node: Any) -> bool:
    return isinstance(node, ShardedArray | ShardedLayer)


def shard(
    params: Tree,
    mesh: DeviceMesh,
    *,
    layers: Iterable[str] = (),
    stacked: Iterable[str] = (),
    param_dtype: npt.DTypeLike | None = None,
    reduce_dtype: npt.DTypeLike | None = None,
    init_sync: bool = True,
) -> Tree:
    """Return ``params`` with this rank's ``ShardedArray`` in place of each floating-point array.

    Arrays are split along their first axis, by ceiling division. Arrays without axes are on all
    ranks. Leaves other than floating-point arrays do not change. All ranks must call.

    Args:
        params: A pytree, the same on all ranks.
        mesh: A slice of one dim, over which to shard. With two dims (HSDP), parameters are
            replicated over the first and sharded over the second.
        layers: Paths of callable layers, such as an equinox model's ``"layers.*"``, where ``*``
            matches within one name. Each becomes a ``ShardedLayer``: ``gather`` skips it, and a
            call gathers its parts.
        stacked: Paths of layers that are stacked along the first axis for ``jax.lax.scan``, such as
            ``"blocks"``. Arrays below them are split along their second axis.
        param_dtype: The dtype to gather and compute in. None: the dtype of each array.
        reduce_dtype: The dtype to reduce gradients in. None: the dtype of the parts.
        init_sync: Compare the ranks' trees (paths, shapes, dtypes). If False, an error of one rank
            is raised on that rank only.

    Raises:
        TypeError: For ``mesh`` of another type. On every rank: for a value that is not a dtype, or
            a layer that is not callable.
        ValueError: For a mesh of more dims or without this rank. On every rank: for a tree without
            floating-point arrays, or a path that matches no node. Also on every rank if trees or
            options differ, naming the first difference.
    """
    where = check_shard_mesh(mesh)
    with raise_on_all_ranks(mesh.process_group if init_sync else None):
        described = TreeOfParameters.of(params)
        if not described.trained():
            raise ValueError(
                f"{where}: params has no floating-point array to train; expected a pytree of"
                f" parameters, got {type(params).__qualname__}"
            )
        below = leaves_below(params, list(stacked), f"{where}: stacked")
        patterns = list(layers)
        leaves_below(params, patterns, f"{where}: layers")
        map_nodes(lambda path, node: _check_layer(path, node, f"{where}: layers"), params, patterns)
        dtypes = [
            None if dtype is None else to_floating(dtype, f"{where}: {name}")
            for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype))
        ]
    if init_sync:
        options = {"param_dtype": dtypes[0], "reduce_dtype": dtypes[1]}
        check_same_tree(described, mesh.process_group, layers=patterns, stacked=below, **options)

    def part_of(path: Any, leaf: Any) -> Any:
        if not is_trained(leaf):
            return leaf
        first = int(path_of(path) in below)
        split = first < leaf.ndim
        axis, length = (first - leaf.ndim, leaf.shape[first]) if split else (None, 0)
        layout = Split(mesh, axis, length, dtypes[0], dtypes[1])
        # Copied because a slice of a JAX array on the CPU could keep the whole array alive.
        return ShardedArray(jnp.array(layout.part_of(leaf)), layout)

    parts = jax.tree_util.tree_map_with_path(part_of, params)
    return map_nodes(lambda _, layer: ShardedLayer(layer), parts, patterns)


def _check_layer(path: str, layer: Any, what: str) -> None:
    if not callable(layer):
        raise TypeError(
            f"{what}: {path} is a {type(layer).__qualname__}, which is not callable; expected a"
            " module. For other layers, call gather or layer(fn) in the model"
        )


def gather(parts: Tree, *, after: Any = None) -> Tree:
    """Return ``parts`` with the whole array in place of each ``ShardedArray``.

    All ranks must call. The gradient of the parts is averaged over all ranks of the mesh. Small
    arrays share a collective. Under ``jax.checkpoint``, backward gathers the arrays again.

    Args:
        parts: A pytree. Other leaves, and each ``ShardedLayer``, do not change.
        after: An array that must be computed before the gather starts. By default XLA may gather
            the arrays of all layers of a Python loop at once. With the layer's own input, one layer
            is whole at a time. With the previous layer's input, two are: XLA may gather the next
            layer while the previous one computes.
    """
    nodes, structure = jax.tree_util.tree_flatten(parts, is_leaf=_is_gathered_apart)
    places = [i for i, node in enumerate(nodes) if is_part(node)]
    arrays = gather_arrays(
        [nodes[i].array for i in places], [nodes[i].split for i in places], after
    )
    for i, whole in zip(places, arrays, strict=True):
        nodes[i] = whole
    return jax.tree_util.tree_unflatten(structure, nodes)


def unshard(parts: Tree) -> Tree:
    """Return the tree before ``shard``, with the current values of ``parts``.

    A ``ShardedLayer`` becomes the whole layer. All ranks must call.
    """

    def bare(node: Any) -> Any:
        return node.parts if isinstance(node, ShardedLayer) else node

    return gather(jax.tree_util.tree_map(bare, parts, is_leaf=_is_gathered_apart))


def layer(
    fn: Callable[..., Any], *, policy: Callable[..., bool] | None = save_results
) -> Callable[..., Any]:
    """Return a function like ``fn`` that accepts a tree of parts as its first argument.

    ``fn(params, *inputs)`` is called with whole arrays. They are gathered after the first array of
    ``inputs`` is computed, and again in backward. ``policy`` determines which results
    ``jax.checkpoint`` saves: by default those of all other operations, with None the inputs only.
    """

    def gathered(parts: Tree, *inputs: Any, **options: Any) -> Any:
        return fn(gather(parts, after=_first_array(inputs)), *inputs, **options)

    return functools.wraps(fn)(jax.checkpoint(gathered, policy=policy))  # pyright: ignore[reportUnknownMemberType, reportPrivateImportUsage]


def _first_array(inputs: Any) -> Any:
    for leaf in jax.tree_util.tree_leaves(inputs):
        if isinstance(leaf, jax.Array) and leaf.size and jnp.issubdtype(leaf.dtype, jnp.number):
            return leaf
    return None


def global_norm(grads: Tree) -> jax.Array:
    """Return the norm of the whole arrays whose parts are in ``grads``. All ranks must call.

    Parts may be those of ``shard``, of ``parallelize``, or of both. The norm has at least single
    precision. For clipping inside ``jit``, multiply by ``jnp.minimum(1, max_norm / norm)``.
    """
    squares: dict[tuple[DeviceMesh, ...], jax.Array] = {(): jnp.zeros(())}

    def add(over: tuple[DeviceMesh, ...], square: jax.Array) -> None:
        squares[over] = squares[over] + square if over in squares else square

    for node in jax.tree_util.tree_leaves(grads, is_leaf=is_split):
        array: Any = node
        over: tuple[DeviceMesh, ...] = ()
        while is_split(array):
            over, array = over + split_over(array), array.array
        if is_trained(array):
            wide = jnp.promote_types(array.dtype, np.float32)
            add(over, jnp.sum(jnp.abs(array.astype(wide)) ** 2))
    while len(squares) > 1:
        # After the sum over one mesh, the result is split over the remaining meshes only.
        over = max(squares, key=len)
        add(over[1:], jit.all_reduce(squares.pop(over), group=over[0]))
    return jnp.sqrt(squares[()])


# ------------------------------------------------------------------ checkpoints


def _is_array(node: Any) -> bool:
    """True for a pytree node that represents one array; for use as ``is_leaf``."""
    return isinstance(node, ShardedArray | SplitWeight | SummedParameter)


def sharding_of(node: Any) -> Sharding | None:
    """Return the sharding of a node's whole array; None if this rank has all of it.

    A node may be split twice: first by ``parallelize``, then by ``shard``.
    """
    splits: list[tuple[DeviceMesh, int]] = []
    while _is_array(node):
        if is_split(node):
            axis = node.axis if isinstance(node, SplitWeight) else node.split.axis
            splits += [(mesh, axis) for mesh in split_over(node)]
        node = node.array
    if not splits:
        return None
    dims: list[tuple[int, ...]] = [()] * node.ndim
    begin = 0
    for mesh, axis in splits:
        dims[axis] += tuple(range(begin, begin + mesh.ndim))
        begin += mesh.ndim
    return Sharding.of_positions(DeviceMesh.concatenate([mesh for mesh, _ in splits]), dims)


def to_global(tree: Tree) -> Tree:
    """Return ``tree`` with a DArray in place of each array split by ``shard`` or ``parallelize``.

    Use it for checkpoints, also of optimizer states, outside of ``jit``. The DArrays contain NumPy
    arrays. A node's array that is not split becomes a NumPy array.
    """

    def whole(node: Any) -> Any:
        if not _is_array(node):
            return node
        sharding, (leaf,) = sharding_of(node), jax.tree_util.tree_leaves(node)
        local = np.asarray(leaf)
        return local if sharding is None else DArray(local, sharding, node.shape, local.dtype)

    return jax.tree_util.tree_map(whole, tree, is_leaf=_is_array)


def from_global(tree: Tree, like: Tree) -> Tree:
    """Return the inverse of ``to_global``, with the layout of ``like``. All ranks must call.

    ``tree`` has DArrays in any sharding, or whole arrays. ``like`` is a tree of nodes, which may be
    on another mesh.
    """

    def part(node: Any, value: Any) -> Any:
        if not _is_array(node):
            return value
        sharding, structure = sharding_of(node), jax.tree_util.tree_structure(node)
        if isinstance(value, DArray):
            value = value.full_array() if sharding is None else value.redistribute(sharding).local
        elif sharding is not None:
            value = value[sharding.slices(value.shape)]
        return jax.tree_util.tree_unflatten(structure, [jnp.array(value)])

    return jax.tree_util.tree_map(part, like, tree, is_leaf=_is_array)
