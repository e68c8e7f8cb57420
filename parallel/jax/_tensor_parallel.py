"""Tensor parallelism for pytrees of weights, inside ``jax.jit``.

The operators are f and g of Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3. Operator f
enters a region in which each rank of ``mesh["tp"]`` computes its part of a layer; g leaves it. A
region with a column parallel matrix, an element-wise function and a row parallel matrix costs two
all-reduces: one forward (in g) and one backward (in f)::

    h = jax.nn.gelu(copy_to_region(x, tp) @ w_in)      # w_in: this rank's columns
    y = reduce_from_region(h @ w_out, tp)              # w_out: this rank's rows

With ``axis=1``, activations outside of the region are split along the sequence (Korthikanti et al.,
arXiv:2205.05198, section 4.2.2). Each operator is then an all-gather in one direction and a
reduce-scatter in the other::

    x = rms_norm(x, copy_to_region(scale, tp))         # its gradient is summed over the ranks
    h = jax.nn.gelu(copy_to_region(x, tp, axis=1) @ w_in)
    y = reduce_from_region(h @ w_out, tp, axis=1)

Outside of these regions all ranks of ``tp`` compute the same values, or each its part of the
sequence. Each rank gets the whole gradient of its arrays, so no gradient is reduced over ``tp``.
(``meshlib.jit.all_reduce`` has another convention: each rank has its own loss, and derivatives are
those of the sum.)

The model's functions are written as for one process: ``x @ params["up"]``. A split weight is a
node of the pytree that implements its multiplication, and applies f and g where needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from meshlib import DeviceMesh, ProcessGroup, ReduceOp, get_rank, get_world_size, jit
from meshlib.sharding import Replicate, Shard
from parallel._checks import check_instance
from parallel._nested import meant_by
from parallel.jax._static import register_node
from parallel.jax._trees import is_trained, path_of
from parallel.tensor_parallel._styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

Group = ProcessGroup | DeviceMesh | None


_Crossing = Callable[[jax.Array, Group, Any], jax.Array]


def _with_derivative(back: _Crossing) -> Callable[[_Crossing], jax.custom_vjp[jax.Array]]:
    """Return a decorator: the function's gradient becomes ``back`` of the result's gradient."""

    def decorate(function: _Crossing) -> jax.custom_vjp[jax.Array]:
        def forward(x: jax.Array, mesh: Group, axis: int | None) -> tuple[jax.Array, None]:
            return function(x, mesh, axis), None

        def backward(mesh: Group, axis: int | None, _: None, grad: jax.Array) -> tuple[jax.Array]:
            return (back(grad, mesh, axis),)

        rule: Any = jax.custom_vjp(function, nondiff_argnums=(1, 2))
        rule.defvjp(forward, backward)
        return rule

    return decorate


def _gather(x: jax.Array, mesh: Group, axis: int | None) -> jax.Array:
    """Gather the ranks' parts ``x`` along ``axis``; None: return ``x``, which is whole."""
    return x if axis is None else jit.all_gather(x, mesh, axis=axis, tiled=True)


def _sum(x: jax.Array, mesh: Group, axis: int | None) -> jax.Array:
    """Return the sum of ``x`` over ``mesh``, or this rank's part of it along ``axis``."""
    if axis is None:
        return jit.all_reduce(x, group=mesh)
    _part_size(x, mesh, axis)
    return jit.reduce_scatter(x, group=mesh, axis=axis, tiled=True)


def _own_part(x: jax.Array, mesh: Group, axis: int) -> jax.Array:
    width, rank = _part_size(x, mesh, axis), get_rank(mesh)
    return jax.lax.slice_in_dim(x, rank * width, (rank + 1) * width, axis=axis)


@_with_derivative(_sum)
def copy_to_region(x: jax.Array, mesh: Group, axis: int | None = None) -> jax.Array:
    """Return ``x``, which is the same on all ranks; its gradient is summed over ``mesh``.

    This is operator f. With ``axis``, ``x`` is this rank's part along it: the ranks' parts are
    gathered, and the gradient is reduce-scattered.
    """
    return _gather(x, mesh, axis)


@_with_derivative(_gather)
def reduce_from_region(x: jax.Array, mesh: Group, axis: int | None = None) -> jax.Array:
    """Return the sum of ``x`` over ``mesh``; its gradient passes unchanged.

    This is operator g. With ``axis``, return this rank's part of the sum along it; the gradient's
    parts are gathered. Raises ValueError when that dim is not divisible by the number of ranks.
    """
    return _sum(x, mesh, axis)


@_with_derivative(_own_part)
def gather_from_region(x: jax.Array, mesh: Group, axis: int = -1) -> jax.Array:
    """Concatenate the ranks' ``x`` along ``axis``; the result is the same on all ranks.

    The gradient, which must be the same on all ranks, is split again.
    """
    return _gather(x, mesh, axis)


@_with_derivative(_gather)
def scatter_to_region(x: jax.Array, mesh: Group, axis: int = -1) -> jax.Array:
    """Return this rank's part along ``axis`` of ``x``, which is the same on all ranks of ``mesh``.

    The gradient is gathered. Raises ValueError when that dim is not divisible by the number of
    ranks.
    """
    return _own_part(x, mesh, axis)


def vocab_parallel_embedding(
    table: jax.Array, indices: jax.Array, mesh: Group, axis: int | None = None
) -> jax.Array:
    """Return the embedding vectors of ``indices``; ``table`` is this rank's block of rows.

    ``table`` is (num_embeddings / size, embedding_dim). ``indices`` are integers of any shape in
    [0, num_embeddings), the same on all ranks of ``mesh``. With ``axis``, return this rank's part
    along it.
    """
    local = indices - get_rank(mesh) * table.shape[0]
    own = (local >= 0) & (local < table.shape[0])
    vectors = table[jnp.where(own, local, 0)]
    return reduce_from_region(jnp.where(own[..., None], vectors, 0), mesh, axis)


def vocab_parallel_cross_entropy(logits: jax.Array, targets: jax.Array, mesh: Group) -> jax.Array:
    """Return the cross-entropy of each sample, the same on all ranks of ``mesh``.

    ``logits`` are (..., classes / size), this rank's block of classes; ``targets`` are integers
    (...) in [0, classes), the same on all ranks. Instead of gathering logits, it all-reduces one
    and then two numbers per sample. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
    """
    own = logits.shape[-1]
    largest = jax.lax.stop_gradient(logits).max(axis=-1, keepdims=True)
    logits = logits - jit.all_reduce(largest, ReduceOp.MAX, mesh)
    local = targets - get_rank(mesh) * own
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, own - 1)[..., None], axis=-1)[..., 0]
    picked = jnp.where((local >= 0) & (local < own), picked, 0)
    sums: jax.Array = reduce_from_region(jnp.stack([jnp.exp(logits).sum(axis=-1), picked]), mesh)
    return jnp.log(sums[0]) - sums[1]


def _part_size(x: jax.Array, mesh: Group, axis: int) -> int:
    size = get_world_size(mesh)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis is {axis}; expected {-x.ndim} to {x.ndim - 1}, for {x.shape}")
    width, rest = divmod(x.shape[axis], size)
    if rest:
        which = "last dim" if axis % x.ndim == x.ndim - 1 else f"dim {axis}"
        raise ValueError(
            f"x has shape {x.shape}; its {which} is not divisible by the {size} ranks of {mesh}"
        )
    return width


_T = TypeVar("_T")
Style = ColwiseParallel | RowwiseParallel | Shard


@register_node("mesh", "style", "axis")
@dataclass(frozen=True)
class SplitWeight:
    """This rank's part of a matrix, split along ``axis``: a pytree node whose leaf is ``array``.

    ``x @ w``, ``w @ x`` and ``w[indices]`` return the same as with the whole matrix, in the layout
    of the ``style``. An array that a plan splits by ``Shard(axis)`` may have any shape, and has no
    products: the model uses its ``array``.
    """

    array: Any
    mesh: DeviceMesh
    style: Style
    axis: int

    __array_ufunc__ = None  # otherwise NumPy's operators convert it to an array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole matrix."""
        shape = list(self.array.shape)
        shape[self.axis] *= get_world_size(self.mesh)
        return tuple(shape)

    def __rmatmul__(self, x: Any) -> jax.Array:
        """Return ``x @ w``; the features of x are its last dim."""
        self._check("x @ w", -1, 0)
        return self._leave(self.enter(x) @ self.array, -1)

    def __matmul__(self, x: Any) -> jax.Array:
        """Return ``w @ x``; the features of x are its only dim, or its second to last."""
        self._check("w @ x", 0, -1)
        y = self.array @ self.enter(x)
        return self._leave(y, -2 if y.ndim > 1 else -1)

    def __getitem__(self, indices: Any) -> Any:
        """Return the rows at ``indices``, integers of any shape, for an embedding.

        ``w[...]``, which flax uses, is the weight itself.
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
            raise TypeError(f"{product}: the weight is split by {self.style}; expected its array")
        if ndim != 2 or self.axis % ndim != wanted % ndim:
            raise TypeError(
                f"{product}: the weight has shape {self.shape}, and is split along axis {self.axis}"
                f" by {type(self.style).__name__}; expected two axes, and a split of axis"
                f" {wanted % 2}; see features_first of parallelize"
            )

    def enter(self, x: Any) -> jax.Array:
        """Return the input ``x`` in the layout for the product with this rank's part."""
        if isinstance(x, _SharedInput):
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


@register_node("mesh")
@dataclass(frozen=True)
class SummedParameter:
    """A whole array whose gradient is summed, for use on each rank's part of the sequence.

    A pytree node whose leaf is ``array``; JAX's operations accept it as an array.
    """

    array: Any
    mesh: DeviceMesh

    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.array.shape

    def __getitem__(self, indices: Any) -> jax.Array:
        """Return the values at ``indices``."""
        return self.__jax_array__()[indices]

    def __jax_array__(self) -> jax.Array:
        return copy_to_region(jnp.asarray(self.array), self.mesh)


@dataclass(frozen=True)
class _SharedInput:
    array: jax.Array

    def __matmul__(self, weight: Any) -> jax.Array:
        return weight.__rmatmul__(self)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("the result of share_input supports only products with weights")


def share_input(x: jax.Array, *weights: Any) -> Any:
    """Return ``x`` for products with all of ``weights``, which then share its communication.

    For example, for queries, keys and values: one all-gather (or none) forward, and one
    reduce-scatter (or all-reduce) backward. If no weight is split, returns ``x`` itself. Raises
    ValueError for weights that are split differently.
    """
    split = [weight for weight in weights if isinstance(weight, SplitWeight)]
    if not split:
        return x
    if len(split) < len(weights) or len({(weight.mesh, weight.style) for weight in split}) > 1:
        raise ValueError("weights that share an input must all be split by one style over one mesh")
    return _SharedInput(split[0].enter(x))


def parallelize(
    params: _T,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle | Shard],
    *,
    features_first: bool = False,
) -> _T:
    """Return ``params`` with this rank's parts of the weights that ``plan`` splits::

        params = parallelize(params, mesh["tp"], {
            "embedding": RowwiseParallel(output_layouts=Shard(1)),
            "blocks.*.norm": SequenceParallel(),
            "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1)),
        })

    The styles are those of ``parallel.parallelize``. A path matches a leaf, or all leaves below a
    node. A bias (an array of one axis) is split with columns, and whole with rows. Matrices become
    ``SplitWeight``s, which support ``x @ w``, ``w @ x`` and ``w[indices]``. ``Shard(axis)`` in
    place of a style splits an array of any shape, such as experts, and the model uses its
    ``array``. ``jax.grad``, optimizers and ``fsdp.shard`` accept the resulting tree. Another
    ``parallelize`` splits the parts once more. Nothing is sent.

    Args:
        params: A pytree, the same on all ranks: dicts, equinox modules.
        mesh: The ranks: ``mesh["tp"]``. This rank's position in it selects the part.
        plan: The style for each path. Paths have dots between names; ``*``, ``?`` and ``[...]``
            match as in file names, within one name.
        features_first: Matrices are (out, in), for ``w @ x``, as in equinox; by default they are
            (in, out), for ``x @ w``. Embeddings are (entries, features) either way.

    Raises:
        ValueError: For a path that does not match (naming similar ones), a leaf that two paths
            match, or a size that is not divisible by the number of ranks.
        TypeError: For a value that is not a mesh or style, and for leaves that are not matrices or
            biases.
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
        return SplitWeight(_part_of_leaf(leaf, path, style.dim, mesh), mesh, style, style.dim)
    if isinstance(style, SequenceParallel):
        return SummedParameter(leaf, mesh)
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        raise TypeError(
            f"plan has {type(style).__name__} for {path!r}, but a tree has no modules with inputs"
            " to prepare; expected ColwiseParallel, RowwiseParallel or SequenceParallel"
        )
    columns = isinstance(style, ColwiseParallel)
    if leaf.ndim == 1:  # a bias, which is added to the product
        if columns and style.output_layouts is None:
            return _part_of_leaf(leaf, path, 0, mesh)
        split_after = not columns and isinstance(style.output_layouts, Shard)
        return SummedParameter(leaf, mesh) if split_after else leaf
    if leaf.ndim != 2:
        raise TypeError(
            f"{path!r} has shape {leaf.shape}; {type(style).__name__} splits matrices and biases"
        )
    axis = int(columns is not features_first)
    return SplitWeight(_part_of_leaf(leaf, path, axis, mesh), mesh, style, axis)


def _part_of_leaf(leaf: Any, path: str, axis: int, mesh: DeviceMesh) -> jax.Array:
    size, rank = get_world_size(mesh), get_rank(mesh)
    if not -leaf.ndim <= axis < leaf.ndim:
        raise ValueError(f"{path!r} has shape {leaf.shape}, and so no axis {axis}")
    width, rest = divmod(leaf.shape[axis], size)
    if rest:
        raise ValueError(
            f"{path!r} has shape {leaf.shape}: axis {axis} is not divisible by the {size} ranks of"
            f" {mesh}"
        )
    # Copied because a slice of a JAX array on the CPU could keep the whole array alive.
    return jnp.array(jax.lax.slice_in_dim(leaf, rank * width, (rank + 1) * width, axis=axis))


def _nodes(path: str) -> Iterator[str]:
    """Yield the paths of a leaf and of the nodes above it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _sequence(layout: Any) -> int | None:
    return layout.dim if isinstance(layout, Shard) else None
