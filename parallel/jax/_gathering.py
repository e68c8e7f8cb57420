"""The gather of sharded arrays inside a program, with its derivative.

Forward gathers; backward averages the gradients and scatters them. Under ``jax.checkpoint``,
backward gathers the arrays again, whatever the policy saves. JAX would save the result of an
operation with an effect, so the gather is a primitive with its own rule for checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.interpreters import partial_eval as pe

from meshlib import DeviceMesh, ProcessGroup, jit
from parallel._core.shards import ShardLayout, row_counts, rows_of

_Arrays = Sequence[jax.Array]


@dataclass(frozen=True)
class Split:
    """The split of an array over the last dim of ``mesh``, the same on all ranks.

    ``axis`` counts from the end, so it remains valid when a loop slices single layers off a stack.
    The whole array has ``length`` elements along it. None: each rank has the whole array.
    """

    mesh: DeviceMesh
    axis: int | None
    length: int
    param_dtype: np.dtype[Any] | None = None
    reduce_dtype: np.dtype[Any] | None = None

    @property
    def shards(self) -> DeviceMesh:
        """The ranks that hold the parts."""
        return self.mesh[self.mesh.ndim - 1]

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the whole array's shape, for a part of ``shape``."""
        whole = list(shape)
        if self.axis is not None:
            whole[self.axis] = self.length
        return tuple(whole)

    def part_of(self, array: Any) -> Any:
        """Return this rank's part of the whole ``array``, as a view where possible."""
        if self.axis is None:
            return array
        shards = self.shards
        rows = rows_of((self.length,), shards.size(), shards.get_local_rank())
        index = [slice(None)] * array.ndim
        index[self.axis] = rows
        return array[tuple(index)]


def gather_arrays(parts: _Arrays, splits: Sequence[Split], after: Any = None) -> Any:
    """Return the whole arrays of ``parts``, in their ``param_dtype``; see ``fsdp.gather``."""
    anchors = () if after is None else (_anchor(jax.lax.stop_gradient(after)),)
    return _gather(tuple(splits), tuple(parts), anchors)


@jax.custom_batching.custom_vmap
def _anchor(array: jax.Array) -> jax.Array:
    """Return the first element of ``array``, if any, as a dependency for later operations."""
    return array.reshape(-1)[:1]


@_anchor.def_vmap  # pyright: ignore[reportUntypedFunctionDecorator]
def _anchor_of_batch(_: int, __: Any, array: jax.Array) -> tuple[jax.Array, bool]:  # pyright: ignore[reportUnusedFunction]
    # With a batch of anchors, the gather would run for each element of the batch.
    return _anchor(array), False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(splits: tuple[Split, ...], parts: _Arrays, anchors: _Arrays) -> list[jax.Array]:
    return _gather_p.bind(*parts, *anchors, splits=splits)


def _forward(splits: tuple[Split, ...], parts: _Arrays, anchors: _Arrays) -> Any:
    return _gather_p.bind(*parts, *anchors, splits=splits), parts


def _backward(splits: tuple[Split, ...], parts: _Arrays, gradients: _Arrays) -> Any:
    """Return this rank's parts of the gradients, averaged over all ranks."""
    like, wide = [], []
    for split, part, grad in zip(splits, parts, gradients, strict=True):
        dtype = split.reduce_dtype or part.dtype
        like.append(jax.ShapeDtypeStruct(part.shape, dtype))
        wide.append(grad.astype(dtype))

    def join(*own: jax.Array) -> list[jax.Array]:
        return _join(own, splits)

    sums: list[jax.Array] = list(jax.linear_transpose(join, *like)(wide))
    replicas: dict[DeviceMesh, list[int]] = {}
    for i, split in enumerate(splits):
        if split.axis is None:  # not summed by the transpose of a gather
            replicas.setdefault(split.mesh, []).append(i)
        elif split.mesh.ndim > 1:
            replicas.setdefault(split.mesh[0], []).append(i)
    for mesh, places in replicas.items():
        summed = jit.all_reduce([sums[i] for i in places], group=mesh)
        for i, total in zip(places, summed, strict=True):
            sums[i] = total
    averages = tuple(
        (total / split.mesh.size()).astype(part.dtype)
        for total, split, part in zip(sums, splits, parts, strict=True)
    )
    return averages, None


_gather.defvjp(_forward, _backward)


def _call(*operands: jax.Array, splits: tuple[Split, ...]) -> list[jax.Array]:
    parts, anchors = operands[: len(splits)], operands[len(splits) :]
    pairs = zip(parts, splits, strict=True)
    return _join(
        [part.astype(split.param_dtype or part.dtype) for part, split in pairs], splits, *anchors
    )


def _join(parts: _Arrays, splits: Sequence[Split], after: Any = None) -> list[jax.Array]:
    """Return the whole arrays of ``parts``, gathering those of one mesh and dtype together."""
    wholes = list(parts)
    together: dict[Any, list[int]] = {}
    for i, split in enumerate(splits):
        if split.axis is not None and split.shards.size() > 1:
            together.setdefault((split.shards, parts[i].dtype), []).append(i)
    for (mesh, _), places in together.items():
        rows = [jnp.moveaxis(parts[i], splits[i].axis or 0, 0) for i in places]
        lengths = [splits[i].length for i in places]
        joined = _join_rows(rows, lengths, mesh.process_group, after)
        for i, whole in zip(places, joined, strict=True):
            wholes[i] = jnp.moveaxis(whole, 0, splits[i].axis or 0)
    return wholes


def _join_rows(
    parts: _Arrays, lengths: Sequence[int], group: ProcessGroup, after: Any
) -> list[jax.Array]:
    """Return the whole arrays, of ``lengths`` rows, whose rows on this rank are ``parts``.

    Small arrays share a collective; each larger one has its own.
    """
    shapes = [(length, *part.shape[1:]) for part, length in zip(parts, lengths, strict=True)]
    layout = ShardLayout(shapes, parts[0].dtype.itemsize, group.size())
    gather = partial(jit.all_gather, group=group, tiled=True, after=after)
    wholes = list(parts)
    for i in layout.direct:
        wholes[i] = gather(parts[i], sizes=row_counts(lengths[i], group.size()))
    if layout.packed:
        own = jnp.concatenate([parts[i].reshape(-1) for i in layout.packed])
        sizes = layout.row_sizes
        rows = jnp.split(gather(own, sizes=sizes), np.cumsum(sizes)[:-1])
        found = [dict(layout.in_row(row, rank)) for rank, row in enumerate(rows)]
        for i in layout.packed:
            wholes[i] = jnp.concatenate([row[i] for row in found]).reshape(shapes[i])
    return wholes


_gather_p = Primitive("meshlib_gather_parts")
_gather_p.multiple_results = True
_program = jax.jit(_call, static_argnames="splits")


@_gather_p.def_impl
def _run(*operands: jax.Array, splits: tuple[Split, ...]) -> list[jax.Array]:  # pyright: ignore[reportUnusedFunction]
    return _program(*operands, splits=splits)


@_gather_p.def_effectful_abstract_eval  # pyright: ignore[reportUntypedFunctionDecorator]
def _abstract_eval(*operands: Any, splits: tuple[Split, ...]) -> Any:  # pyright: ignore[reportUnusedFunction]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    traced = jax.make_jaxpr(partial(_call, splits=splits))(*like)
    return traced.out_avals, traced.effects


def _batch(operands: Any, dims: Any, *, splits: tuple[Split, ...]) -> tuple[Any, Any]:
    """Gather a batch of parts in one call, which is valid because axes count from the end."""
    moved = [
        x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)
    ]
    wholes = _gather_p.bind(*moved, splits=splits)
    return wholes, [None if dim is None else 0 for dim in dims[: len(splits)]]


def _partial_eval(_: Any, unknown: Sequence[bool], available: Sequence[bool], eqn: Any) -> Any:
    """Under ``jax.checkpoint``: gather in forward, save no results, gather again in backward."""
    count, only_backward = len(eqn.outvars), any(unknown)
    saved = [x for x, in_backward in zip(eqn.invars, available, strict=True) if not in_backward]
    in_forward = None if only_backward else eqn
    return in_forward, eqn, [only_backward] * count, [True] * count, saved


def _drop_unused(used: Sequence[bool], eqn: Any) -> Any:
    """Drop a gather with unused results; all ranks do so, because they run the same program."""
    needed = any(used)
    return [needed] * len(eqn.invars), eqn if needed else None


batching.primitive_batchers[_gather_p] = _batch
mlir.register_lowering(_gather_p, mlir.lower_fun(_call, multiple_results=True))
pe.partial_eval_jaxpr_custom_rules[_gather_p] = _partial_eval
pe.dce_rules[_gather_p] = _drop_unused


_LAYOUTS = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)


def save_results(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy for ``jax.checkpoint``: save computed results, but not mere changes of layout.

    Otherwise the transpose of a gathered parameter would keep the parameter alive until backward.
    """
    return primitive.name not in _LAYOUTS
