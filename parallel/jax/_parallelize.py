"""Splitting the weights of a pytree over ``mesh["tp"]``, by a plan of paths and styles.

The model's functions stay what they are for one process: ``x @ params["up"]``. A weight that is
split is a node of the tree that knows how it is multiplied, and crosses between whole activations
and split ones where that is needed (``parallel.jax._tensor_parallel``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from meshlib import DeviceMesh, get_rank, get_world_size
from meshlib.sharding import Replicate, Shard
from parallel._checks import check_instance
from parallel._nested import meant_by
from parallel.jax._tensor_parallel import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
    vocab_parallel_embedding,
)
from parallel.jax._trees import is_trained, path_of
from parallel.tensor_parallel._styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

_T = TypeVar("_T")
Style = ColwiseParallel | RowwiseParallel | Shard


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["mesh", "style", "axis"],
)
@dataclass(frozen=True)
class SplitWeight:
    """This rank's part of a matrix, along ``axis``: a node of a pytree, whose leaf is ``array``.

    ``x @ w``, ``w @ x`` and ``w[indices]`` are what they would be with the whole matrix, but for
    the layouts that the ``style`` gives. An array that a plan splits by ``Shard(axis)``, of any
    shape, has no products: the model takes its ``array``.
    """

    array: Any
    mesh: DeviceMesh
    style: Style
    axis: int

    __array_ufunc__ = None  # or NumPy takes it for an array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole matrix."""
        shape = list(self.array.shape)
        shape[self.axis] *= get_world_size(self.mesh)
        return tuple(shape)

    def __rmatmul__(self, x: Any) -> jax.Array:
        """Return ``x @ w``: the features of x are its last dim."""
        self._check("x @ w", -1, 0)
        return self._leave(self.enter(x) @ self.array, -1)

    def __matmul__(self, x: Any) -> jax.Array:
        """Return ``w @ x``: the features of x are its only dim, or its last but one."""
        self._check("w @ x", 0, -1)
        y = self.array @ self.enter(x)
        return self._leave(y, -2 if y.ndim > 1 else -1)

    def __getitem__(self, indices: Any) -> Any:
        """Return the rows of ``indices``, whole numbers of any shape: an embedding.

        ``w[...]`` is the weight itself, as flax asks for it.
        """
        if indices is Ellipsis:
            return self
        if not isinstance(self.style, RowwiseParallel) or self.axis % self.array.ndim:
            raise TypeError("w[indices] needs a weight split by RowwiseParallel() along axis 0")
        axis = _sequence(self.style.output_layouts)
        return vocab_parallel_embedding(self.array, jnp.asarray(indices), self.mesh, axis)

    def _check(self, product: str, columns: int, rows: int) -> None:
        ndim = self.array.ndim
        wanted = columns if isinstance(self.style, ColwiseParallel) else rows
        if isinstance(self.style, Shard):
            raise TypeError(f"{product} with a weight that is split by {self.style}: use its array")
        if ndim != 2 or self.axis % ndim != wanted % ndim:
            raise TypeError(
                f"{product} with a weight of shape {self.shape}, split along axis {self.axis} by"
                f" {type(self.style).__name__}: expected two axes, and a split of axis"
                f" {wanted % 2}; see features_first of parallelize"
            )

    def enter(self, x: Any) -> jax.Array:
        """Return the input ``x`` as the product with this rank's part takes it."""
        if isinstance(x, _Entered):
            return x.array
        assert not isinstance(self.style, Shard), "it was checked"
        x, layout = jnp.asarray(x), self.style.input_layouts
        if isinstance(self.style, ColwiseParallel):
            return copy_to_region(x, self.mesh, _sequence(layout))
        return scatter_to_region(x, self.mesh) if isinstance(layout, Replicate) else x

    def _leave(self, y: jax.Array, features: int) -> jax.Array:
        assert not isinstance(self.style, Shard), "it was checked"
        layout = self.style.output_layouts
        if isinstance(self.style, RowwiseParallel):
            return reduce_from_region(y, self.mesh, _sequence(layout))
        return gather_from_region(y, self.mesh, features) if isinstance(layout, Replicate) else y


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["mesh"])
@dataclass(frozen=True)
class SummedParameter:
    """A whole array that each rank applies to its part of the sequence: its gradient is summed.

    A node of a pytree, whose leaf is ``array``; in JAX's operations it is an array.
    """

    array: Any
    mesh: DeviceMesh

    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    def __getitem__(self, indices: Any) -> jax.Array:
        """Return what the array has there."""
        return self.__jax_array__()[indices]

    def __jax_array__(self) -> jax.Array:
        return copy_to_region(jnp.asarray(self.array), self.mesh)


@dataclass(frozen=True)
class _Entered:
    array: jax.Array

    def __matmul__(self, weight: Any) -> jax.Array:
        return weight.__rmatmul__(self)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("what share_input returned is for products with weights only")


def share_input(x: jax.Array, *weights: Any) -> Any:
    """Return ``x`` for products with all of ``weights``, split alike: it crosses once for them.

    As queries, keys and values share their input: one all-gather (or none) forward, and one
    reduce-scatter (or all-reduce) backward. With weights that are not split, ``x`` itself.
    """
    split = [weight for weight in weights if isinstance(weight, SplitWeight)]
    if not split:
        return x
    if len(split) < len(weights) or len({(one.mesh, one.style) for one in split}) > 1:
        raise ValueError("weights that share an input must all be split by one style over one mesh")
    return _Entered(split[0].enter(x))


def parallelize(
    params: _T,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle | Shard],
    *,
    features_first: bool = False,
) -> _T:
    """Return ``params`` with this rank's parts of the weights that ``plan`` splits over ``mesh``::

        params = parallelize(params, mesh["tp"], {
            "embedding": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1)),
        })

    The styles are those of ``parallel.parallelize``. A path means a leaf, or all leaves below a
    node. A bias there, an array of one axis, is split with the columns and whole with the rows.
    Matrices become ``SplitWeight``s, of which ``x @ w``, ``w @ x`` and ``w[indices]`` work as
    before. ``Shard(axis)`` in the place of a style splits an array of any shape, such as experts,
    and the model uses its ``array``. Gradients, optimizers and ``fsdp.shard`` take the tree as it
    is; another ``parallelize`` splits parts once more.

    Args:
        params: a pytree, the same on all ranks: dicts, equinox modules.
        mesh: the ranks: ``mesh["tp"]``, whose rank in it decides which part is kept.
        plan: for paths, with dots between names, how what they mean is split. ``*``, ``?`` and
            ``[...]`` stand for what they do in file names, within one name.
        features_first: whether matrices are (out, in), for ``w @ x``, as equinox has them; by
            default (in, out), for ``x @ w``. Embeddings are (entries, features) either way.

    Raises:
        ValueError: for a path that nothing has, with the nearest ones, or a leaf that two paths
            mean; for sizes that do not divide by the ranks. Nothing is sent.
        TypeError: for what is no mesh or style, and for leaves that are no matrices or biases.
    """
    check_instance(mesh, DeviceMesh, "mesh", "mesh['tp']")
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [path_of(path) for path, _ in leaves]
    for name, style in plan.items():
        if not isinstance(style, Shard):
            check_instance(style, ParallelStyle, f"plan[{name!r}]", "ColwiseParallel()")
    nodes = {path: list(_nodes(path)) for path in paths}
    styles = meant_by(plan, nodes, "the tree does not have")
    cut: list[Any] = []
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        style = styles.get(path)
        if style is None or not is_trained(leaf):
            cut.append(leaf)
        else:
            cut.append(_cut(leaf, path, style, mesh, features_first))
    return jax.tree_util.tree_unflatten(structure, cut)


def _cut(
    leaf: Any, path: str, style: ParallelStyle | Shard, mesh: DeviceMesh, features_first: bool
) -> Any:
    if isinstance(style, Shard):
        return SplitWeight(_own_part(leaf, path, style.dim, mesh), mesh, style, style.dim)
    if isinstance(style, SequenceParallel):
        return SummedParameter(leaf, mesh)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        raise TypeError(
            f"plan has {type(style).__name__} for {path!r}: a tree has no modules with inputs to be"
            " prepared; expected ColwiseParallel, RowwiseParallel or SequenceParallel"
        )
    columns = isinstance(style, ColwiseParallel)
    if leaf.ndim == 1:  # a bias, which is added to what the product returns
        if columns and style.output_layouts is None:
            return _own_part(leaf, path, 0, mesh)
        split_after = not columns and isinstance(style.output_layouts, Shard)
        return SummedParameter(leaf, mesh) if split_after else leaf
    if leaf.ndim != 2:
        raise TypeError(
            f"{path!r} has shape {leaf.shape}; {type(style).__name__} splits matrices and biases"
        )
    axis = int(columns is not features_first)
    return SplitWeight(_own_part(leaf, path, axis, mesh), mesh, style, axis)


def _own_part(leaf: Any, path: str, axis: int, mesh: DeviceMesh) -> jax.Array:
    size, rank = get_world_size(mesh), get_rank(mesh)
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(f"{path!r} has shape {leaf.shape}, and so no axis {axis}")
    width, rest = divmod(leaf.shape[axis], size)
    if rest:
        raise ValueError(
            f"{path!r} has shape {leaf.shape}: axis {axis} does not divide by the {size} ranks of"
            f" {mesh}"
        )
    # A copy: a slice of a JAX array on the CPU could keep the whole alive.
    return jnp.array(jax.lax.slice_in_dim(leaf, rank * width, (rank + 1) * width, axis=axis))


def _nodes(path: str) -> Iterator[str]:
    """Yield the paths of a leaf and of the nodes that it is below."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _sequence(layout: Any) -> int | None:
    return layout.dim if isinstance(layout, Shard) else None
