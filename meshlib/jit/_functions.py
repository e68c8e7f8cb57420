"""The collectives for use inside ``jax.jit``, on plain arrays, without tokens.

Every function may be called inside ``jit``, ``grad``, ``vmap``, ``scan``, ``while_loop``'s body,
``cond`` and ``checkpoint``, and outside of them. A ``group`` is a mesh (``mesh["dp"]``), a process
group, or None. None is the default group at the time of tracing. In a group of one rank, the
functions make no call.

While being traced, all functions raise TypeError for an unsupported dtype or op, and ValueError
for wrong shapes and ranks, and on a rank that is not in the group. When the program runs, an error
(``CollectiveMismatchError``, ``RankFailedError`` …) ends it and breaks the group. The program then
raises a ``jax.errors.JaxRuntimeError``, whose text ends with the error's type and text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from meshlib._collectives.group_of_ranks import resolve_rank
from meshlib._job.current import Group, resolve_group
from meshlib.jit import _kinds as kinds
from meshlib.jit._arguments import (
    calls_group,
    check_axis,
    check_sizes,
    in_one_call,
    is_tree,
    multiplied,
    prepare,
    split_rows,
)
from meshlib.jit._collective import bind
from meshlib.jit._uneven import UnevenAllGather
from meshlib.jit._xla.host_calls import host_call
from transport._operands.prefixes import levels
from transport._operands.reduce_op import RedOpType, ReduceOp


def all_reduce(
    x: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    *,
    transpose: Literal["all_reduce", "identity"] = "all_reduce",
) -> Any:
    """Return the reduction of the members' ``x``, of any shape, with equal bits on all members.

    ``x`` may be a pytree of arrays, equal in structure and shapes on all members. The function then
    makes one call for each dtype in it, and returns a tree of the same structure.

    The transpose of SUM is SUM (that of AVG is AVG): cotangents are summed over the members, as
    if the loss were the sum of all members' losses. MIN and MAX pass cotangents in equal shares to
    the members that hold the extreme value. PRODUCT and PREMUL_SUM also have derivatives.

    ``transpose="identity"`` is for members that all compute one loss from the result: the
    transpose of SUM then passes each member's own cotangent, without a call. Raises ValueError for
    another op.
    """
    if is_tree(x):
        return in_one_call(lambda flat: all_reduce(flat, op, group, transpose=transpose), x, group)
    x, calls = prepare(x, group)
    x, op = multiplied(x, op)
    if transpose not in ("all_reduce", "identity"):
        raise ValueError(f"transpose is {transpose!r}; expected 'all_reduce' or 'identity'")
    of_one_loss = transpose == "identity"
    if of_one_loss and op.kind is not RedOpType.SUM:
        raise ValueError(f"transpose='identity' goes with ReduceOp.SUM only, got {op}")
    return x if calls.size() == 1 else bind(kinds.AllReduce(calls, op, of_one_loss), x)


def broadcast(
    x: Any, src: int | None = None, group: Group = None, *, group_src: int | None = None
) -> Any:
    """Return the ``x`` of the member ``src`` (global rank) or ``group_src`` on all members.

    ``x`` has the same shape everywhere; it may be a pytree, as for ``all_reduce``. The transpose is
    ``reduce``.
    """
    if is_tree(x):
        return in_one_call(lambda flat: broadcast(flat, src, group, group_src=group_src), x, group)
    x, calls = prepare(x, group)
    root = resolve_rank(resolve_group(group), src, group_src, "src")
    return x if calls.size() == 1 else bind(kinds.Broadcast(calls, root), x)


def reduce(
    x: Any,
    dst: int | None = None,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    *,
    group_dst: int | None = None,
) -> Any:
    """Return the reduction of the members' ``x`` on ``dst`` (global) or ``group_dst``, else zeros.

    ``x`` may be a pytree, as for ``all_reduce``. The transpose of SUM is ``broadcast``; the other
    ops have the derivatives of ``all_reduce``.
    """
    if is_tree(x):
        return in_one_call(lambda flat: reduce(flat, dst, op, group, group_dst=group_dst), x, group)
    x, calls = prepare(x, group)
    x, op = multiplied(x, op)
    root = resolve_rank(resolve_group(group), dst, group_dst, "dst")
    return x if calls.size() == 1 else bind(kinds.Reduce(calls, root, op), x)


def all_gather(
    x: Any,
    group: Group = None,
    *,
    axis: int = 0,
    tiled: bool = False,
    sizes: Sequence[int] | None = None,
    after: jax.Array | None = None,
) -> jax.Array:
    """Return the members' ``x`` stacked along a new ``axis``, or joined along it if ``tiled``.

    As ``jax.lax.all_gather``. The transpose is ``reduce_scatter``. If members have different
    lengths along ``axis``, pass ``sizes``, these lengths in group order, with ``tiled``; nothing is
    padded. The program makes the call, and allocates its result, after it has computed ``after``,
    an array of any shape.
    """
    x, calls = prepare(x, group)
    axis = check_axis(axis, x.ndim + (not tiled), "axis")
    anchors = () if after is None else (after.reshape(-1)[:1],)
    if sizes is not None:
        lengths = check_sizes(sizes, x, axis, calls, tiled)
        if calls.size() == 1:
            return x
        gather = UnevenAllGather(calls, lengths)
        return jnp.moveaxis(bind(gather, jnp.moveaxis(x, axis, 0), anchors=anchors), 0, axis)
    rows = x[None] if calls.size() == 1 else bind(kinds.AllGather(calls), x, anchors=anchors)
    rows = jnp.moveaxis(rows, 0, axis)
    if not tiled:
        return rows
    shape = list(x.shape)
    shape[axis] *= calls.size()
    return rows.reshape(shape)


def reduce_scatter(
    x: Any,
    op: ReduceOp = ReduceOp.SUM,
    group: Group = None,
    *,
    axis: int = 0,
    tiled: bool = False,
) -> jax.Array:
    """Reduce the members' ``x`` and return this member's part of the result along ``axis``.

    ``axis`` has one entry for each member and is removed. If ``tiled``, its length is divided by
    the number of members instead. As ``jax.lax.psum_scatter``. The transpose is ``all_gather``.
    """
    x, calls = prepare(x, group)
    x, op = multiplied(x, op)
    axis = check_axis(axis, x.ndim, "axis")
    rows = split_rows(x, axis, calls.size(), tiled)
    return rows[0] if calls.size() == 1 else bind(kinds.ReduceScatter(calls, op), rows)


def all_to_all(
    x: Any,
    group: Group = None,
    *,
    split_axis: int = 0,
    concat_axis: int = 0,
    tiled: bool = False,
) -> jax.Array:
    """Send part i of ``x`` along ``split_axis`` to member i; return the parts from all members.

    The received parts are joined along ``concat_axis``.

    ``split_axis`` has one entry for each member and is removed; ``concat_axis`` is a new axis. If
    ``tiled``, the length of ``split_axis`` is divided by the number of members instead, and that of
    ``concat_axis`` multiplied. As ``jax.lax.all_to_all``. The transpose is another ``all_to_all``.
    """
    x, calls = prepare(x, group)
    split_axis = check_axis(split_axis, x.ndim, "split_axis")
    concat_axis = check_axis(concat_axis, x.ndim, "concat_axis")
    rows = split_rows(x, split_axis, calls.size(), tiled)
    if calls.size() > 1:
        rows = bind(kinds.AllToAll(calls), rows)
    if not tiled:
        return jnp.moveaxis(rows, 0, concat_axis)
    shape = list(rows.shape[1:])
    shape[concat_axis] *= calls.size()
    return jnp.moveaxis(rows, 0, concat_axis).reshape(shape)


_COMBINE: dict[RedOpType, Callable[[jax.Array, jax.Array], jax.Array]] = {
    RedOpType.SUM: jnp.add,
    RedOpType.PRODUCT: jnp.multiply,
    RedOpType.MIN: jnp.minimum,
    RedOpType.MAX: jnp.maximum,
    RedOpType.BAND: jnp.bitwise_and,
    RedOpType.BOR: jnp.bitwise_or,
    RedOpType.BXOR: jnp.bitwise_xor,
}


def scan(x: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> jax.Array:
    """Return the reduction of the ``x`` of the members 0 to this one: a prefix, as ``MPI_Scan``.

    ``x`` has any shape, equal on all members. The result of member i has the bits of an
    ``all_reduce`` among the members 0 to i. Floats of 8 and 16 bits are combined in float32 and
    rounded once. Each member sends and receives at most twice the bytes of ``x``, whatever the
    number of members. Raises ValueError for AVG.
    """
    x, calls = prepare(x, group)
    x, op = multiplied(x, op)
    combine = _COMBINE.get(op.kind)
    if combine is None:
        raise ValueError(f"op is {op}; expected one that a prefix has, such as ReduceOp.SUM")
    size = calls.size()
    if size == 1:
        return x
    # Each member gets one part of all members' arrays, and returns the prefixes of that part.
    width = -(-x.size // size)
    exchange = kinds.ScanExchange(calls, op)
    rows = jnp.pad(x.reshape(-1), (0, width * size - x.size)).reshape(size, width)
    rows = bind(exchange, rows)
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < np.dtype(np.float32).itemsize:
        rows = rows.astype(np.float32)

    rows = bind(exchange, _prefixes(combine, rows).astype(x.dtype))
    return rows.reshape(-1)[: x.size].reshape(x.shape)


def _prefixes(combine: Callable[[jax.Array, jax.Array], jax.Array], rows: jax.Array) -> jax.Array:
    """Return the prefixes of ``rows``, as ``transport._operands.prefixes.prefixes``."""
    found, blocks = rows, rows
    for level in levels(len(rows)):
        later = combine(blocks[level.to_later], found[level.later])
        found = found.at[level.first].set(blocks[level.to_first]).at[level.later].set(later)
        pairs = len(blocks) // 2 * 2
        blocks = combine(blocks[0:pairs:2], blocks[1:pairs:2])
    return found


def gather(
    x: Any, dst: int | None = None, group: Group = None, *, group_dst: int | None = None
) -> jax.Array:
    """Return the members' ``x`` stacked along dim 0 on ``dst`` (global) or ``group_dst``.

    The other members get zeros of the same shape. The transpose is ``scatter``.
    """
    x, calls = prepare(x, group)
    root = resolve_rank(resolve_group(group), dst, group_dst, "dst")
    return x[None] if calls.size() == 1 else bind(kinds.Gather(calls, root), x)


def scatter(
    x: Any, src: int | None = None, group: Group = None, *, group_src: int | None = None
) -> jax.Array:
    """Return row i of the ``x`` of ``src`` (global) or ``group_src`` on member i.

    ``x`` has one row for each member and the same shape everywhere; only the source's values
    matter. The transpose is ``gather``.
    """
    x, calls = prepare(x, group)
    root = resolve_rank(resolve_group(group), src, group_src, "src")
    rows = split_rows(x, 0, calls.size(), tiled=False)
    return rows[0] if calls.size() == 1 else bind(kinds.Scatter(calls, root), rows)


def barrier(group: Group = None) -> None:
    """Wait until all members have reached the barrier, in order with other collectives.

    XLA may still move computation across a barrier.
    """
    calls = calls_group(group)
    if calls.size() > 1:
        host_call(lambda _, __, ___: calls.barrier(), [], ordered=True, on_gpu=True, group=calls)
