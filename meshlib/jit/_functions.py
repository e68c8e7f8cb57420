"""The collectives for use inside ``jax.jit``: plain arrays in, plain arrays out, no tokens.

Every function may be called inside ``jit``, ``grad``, ``vmap``, ``scan``, ``while_loop``'s body,
``cond`` and ``checkpoint``, and outside of all. ``group`` is a mesh (``mesh["dp"]``), a process
group, or None for the default group, found when the function is traced. In a group of one rank
nothing is called.

All raise, while being traced: TypeError for a dtype or op that makes no sense, ValueError for wrong
shapes and ranks, and for a group that this rank is not in. When the program runs, what goes wrong
(``CollectiveMismatchError``, ``RankFailedError`` …) ends the program with a
``jax.errors.JaxRuntimeError`` that ends with the error's type and text; the group is then broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlib._arrays.checks import check_op
from meshlib._collectives.group_of_ranks import resolve_rank
from meshlib._collectives.point_to_point import check_tag
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import (
    Group,
    derived_group,
    find_world,
    is_thread_world,
    resolve_group,
    resolve_process_group,
)
from meshlib.jit import _kinds as kinds
from meshlib.jit import _messages as messages
from meshlib.jit._collective import bind
from meshlib.jit._host_calls import host_call, internals
from meshlib.jit._permuting import Permute, PermuteDone, PermuteStart
from meshlib.jit._uneven import UnevenAllGather
from transport._call import dtype_code
from transport._checks import to_whole_number
from transport._operands.reduce_op import RedOpType, ReduceOp


def all_reduce(x: Any, op: ReduceOp = ReduceOp.SUM, group: Group = None) -> Any:
    """Return the reduction of the members' ``x``, any shape, the same bits on all members.

    ``x`` may be a pytree of arrays, equal in structure and shapes on all members: it goes in one
    call for each dtype in it, and a tree of the same structure is returned.

    The derivative of SUM is SUM (that of AVG is AVG): cotangents are summed over the members, as
    if the loss were the sum of all members' losses. MIN and MAX pass cotangents to the members
    that hold the value, in equal shares. PRODUCT and PREMUL_SUM have derivatives, too.
    """
    if _is_tree(x):
        return _together(lambda flat: all_reduce(flat, op, group), x, group)
    x, calls = _prepare(x, group)
    x, op = _multiplied(x, op)
    return x if calls.size() == 1 else bind(kinds.AllReduce(calls, op), x)


def _is_tree(x: Any) -> bool:
    leaves, structure = jax.tree_util.tree_flatten(x)
    return bool(leaves) and not jax.tree_util.treedef_is_leaf(structure)


def _together(call: Callable[[jax.Array], jax.Array], tree: Any, group: Group) -> Any:
    """Return ``call`` of the tree's leaves, those of one dtype joined, in their places."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = [_prepare(leaf, group)[0] for leaf in leaves]
    by_dtype: dict[Any, list[int]] = {}
    for number, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(number)
    for numbers in by_dtype.values():
        flat = jnp.concatenate([arrays[number].reshape(-1) for number in numbers])
        ends = np.cumsum([arrays[number].size for number in numbers])[:-1]
        parts = jnp.split(call(flat), ends)
        for number, part in zip(numbers, parts, strict=True):
            arrays[number] = part.reshape(arrays[number].shape)
    return jax.tree_util.tree_unflatten(structure, arrays)


def broadcast(
    x: Any, src: int | None = None, group: Group = None, *, group_src: int | None = None
) -> Any:
    """Return ``x`` of the member ``src`` (global rank) or ``group_src`` on all members.

    ``x`` has the same shape everywhere; it may be a pytree, as for ``all_reduce``. The transpose is
    ``reduce``.
    """
    if _is_tree(x):
        return _together(lambda flat: broadcast(flat, src, group, group_src=group_src), x, group)
    x, calls = _prepare(x, group)
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
    if _is_tree(x):
        return _together(lambda flat: reduce(flat, dst, op, group, group_dst=group_dst), x, group)
    x, calls = _prepare(x, group)
    x, op = _multiplied(x, op)
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

    As ``jax.lax.all_gather``. The transpose is ``reduce_scatter``. Where members have different
    lengths along ``axis``, ``sizes`` are they, in group order, the same on all members; nothing is
    padded. That goes with ``tiled``. The call is not made before
    ``after``, an array of any shape, has been computed: what is gathered takes memory from then on.
    """
    x, calls = _prepare(x, group)
    axis = _check_axis(axis, x.ndim + (not tiled), "axis")
    anchors = () if after is None else (after.reshape(-1)[:1],)
    if sizes is not None:
        lengths = _check_sizes(sizes, x, axis, calls, tiled)
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

    ``axis`` has one entry for each member and goes away; if ``tiled``, it is divided by their
    number. As ``jax.lax.psum_scatter``. The transpose is ``all_gather``.
    """
    x, calls = _prepare(x, group)
    x, op = _multiplied(x, op)
    axis = _check_axis(axis, x.ndim, "axis")
    rows = _split(x, axis, calls.size(), tiled)
    return rows[0] if calls.size() == 1 else bind(kinds.ReduceScatter(calls, op), rows)


def all_to_all(
    x: Any,
    group: Group = None,
    *,
    split_axis: int = 0,
    concat_axis: int = 0,
    tiled: bool = False,
) -> jax.Array:
    """Send part i of ``x`` along ``split_axis`` to member i; join what comes along ``concat_axis``.

    ``split_axis`` has one entry for each member and goes away, and ``concat_axis`` is a new one;
    if ``tiled``, the one is divided and the other multiplied by their number. As
    ``jax.lax.all_to_all``. The transpose is another ``all_to_all``.
    """
    x, calls = _prepare(x, group)
    split_axis = _check_axis(split_axis, x.ndim, "split_axis")
    concat_axis = _check_axis(concat_axis, x.ndim, "concat_axis")
    rows = _split(x, split_axis, calls.size(), tiled)
    if calls.size() > 1:
        rows = bind(kinds.AllToAll(calls), rows)
    if not tiled:
        return jnp.moveaxis(rows, 0, concat_axis)
    shape = list(rows.shape[1:])
    shape[concat_axis] *= calls.size()
    return jnp.moveaxis(rows, 0, concat_axis).reshape(shape)


def gather(
    x: Any, dst: int | None = None, group: Group = None, *, group_dst: int | None = None
) -> jax.Array:
    """Return the members' ``x`` stacked along dim 0 on ``dst`` (global) or ``group_dst``.

    The other members get zeros of the same shape. The transpose is ``scatter``.
    """
    x, calls = _prepare(x, group)
    root = resolve_rank(resolve_group(group), dst, group_dst, "dst")
    return x[None] if calls.size() == 1 else bind(kinds.Gather(calls, root), x)


def scatter(
    x: Any, src: int | None = None, group: Group = None, *, group_src: int | None = None
) -> jax.Array:
    """Return row i of the ``x`` of ``src`` (global) or ``group_src`` on member i.

    ``x`` has one row for each member and the same shape everywhere; only the source's values
    matter. The transpose is ``gather``.
    """
    x, calls = _prepare(x, group)
    root = resolve_rank(resolve_group(group), src, group_src, "src")
    rows = _split(x, 0, calls.size(), tiled=False)
    return rows[0] if calls.size() == 1 else bind(kinds.Scatter(calls, root), rows)


def permute(x: Any, perm: Iterable[tuple[int, int]], group: Group = None) -> Any:
    """Return the ``x`` of the member that ``perm`` pairs with this one; zeros if there is none.

    ``perm`` has pairs (source, destination) of *group* ranks, each rank at most once as either,
    equal on all members. ``x`` may be a pytree, as for ``all_reduce``. As ``jax.lax.ppermute``. The
    transpose is the inverse ``permute``.
    """
    perm = list(perm)
    if _is_tree(x):
        return _together(lambda flat: permute(flat, perm, group), x, group)
    x, calls = _prepare(x, group)
    pairs = _pairs(perm, calls.size())
    if calls.size() == 1:
        return x if pairs else jnp.zeros_like(x)
    return bind(Permute(calls, pairs), x)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["halves"])
@dataclass(frozen=True)
class Passing:
    """A ``permute`` that was begun: ``permute_done`` ends it. A pytree."""

    x: jax.Array
    """What was given, once it is on its way: what is computed with this comes after the start."""
    halves: tuple[PermuteStart, PermuteDone]


def permute_start(
    x: Any, perm: Iterable[tuple[int, int]], group: Group = None, *, tag: int = 0
) -> Passing:
    """Begin a ``permute``, and compute meanwhile: ``permute_done`` waits for it.

        passing = mj.permute_start(x, perm, group)
        y = f(passing.x)                            # x, and computed after the start
        x = mj.permute_done(passing, after=y)       # not waited for before y is there

    ``tag``, 0 to 2**32 - 1, tells apart what is under way at the same time: one for each tag. What
    is sent is a copy of ``x``, and what comes has memory of its own: a rank has two arrays more
    meanwhile. On a GPU all of it happens at the end. The derivative is that of ``permute``, whole.

    If a program ends between the two, by an error of another call in it, the permute is broken off
    on all members, and says by what.
    """
    x, calls = _prepare(x, group)
    pairs = _pairs(perm, calls.size())
    check_tag(tag)
    whole = Permute(calls, pairs)
    halves = PermuteStart(calls, whole, tag), PermuteDone(calls, whole, tag)
    return Passing(x if calls.size() == 1 else bind(halves[0], x), halves)


def permute_done(passing: Passing, after: Any = None) -> jax.Array:
    """Return what ``permute`` would have returned where ``passing`` was begun.

    Waits for it when the arrays of ``after``, a pytree, have been computed.
    """
    half = passing.halves[1]
    if half.group.size() == 1:
        return passing.x if half.whole.pairs else jnp.zeros_like(passing.x)
    return bind(half, passing.x, anchors=jax.tree_util.tree_leaves(after))


def send(
    x: Any,
    dst: int | None = None,
    group: Group = None,
    *,
    tag: int = 0,
    group_dst: int | None = None,
) -> jax.Array:
    """Send ``x`` to ``dst`` (global) or ``group_dst``, which calls ``recv``; return ``x``.

    For programs that differ by rank; where all ranks run the same one, ``permute`` cannot
    deadlock. Two ranks that send large arrays to each other before either receives wait until
    the deadline. For derivatives, use what is returned: its cotangent is joined with the one that
    comes back from the receiver.
    """
    x, calls = _prepare(x, group)
    peer = resolve_rank(resolve_group(group), dst, group_dst, "dst")
    check_tag(tag)
    return bind(messages.Send(calls, peer, tag), x)


def recv(
    like: Any,
    src: int | None = None,
    group: Group = None,
    *,
    tag: int = 0,
    group_src: int | None = None,
) -> jax.Array:
    """Return what ``src`` (global) or ``group_src`` sends, of the shape and dtype of ``like``.

    The transpose sends the cotangent back. For that, ``like`` has to depend on what one
    differentiates by (its values do not matter): otherwise JAX sees a constant.
    """
    like, calls = _prepare(like, group)
    peer = resolve_rank(resolve_group(group), src, group_src, "src")
    check_tag(tag)
    return bind(messages.Receive(calls, peer, tag), like)


def sendrecv(
    x: Any,
    dst: int | None = None,
    src: int | None = None,
    group: Group = None,
    *,
    like: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
    group_src: int | None = None,
) -> jax.Array:
    """Send ``x`` to ``dst`` and return what ``src`` sends, both global ranks, or ``group_`` ones.

    Neither waits for the other, so that members may exchange arrays of any size; only those that
    take part call it, or ``send`` and ``recv``. What comes has the shape and dtype of ``like``, by
    default of ``x``. The transpose sends the cotangent to ``src`` and receives one from ``dst``.
    """
    x, calls = _prepare(x, group)
    base = resolve_group(group)
    to, origin = (
        resolve_rank(base, dst, group_dst, "dst"),
        resolve_rank(base, src, group_src, "src"),
    )
    check_tag(tag)
    comes = goes = None
    if like is not None and (like.shape, like.dtype) != (x.shape, x.dtype):
        dtype_code(like.dtype)
        comes, goes = ((tuple(one.shape), str(one.dtype)) for one in (like, x))
    return bind(messages.Exchange(calls, to, origin, tag, comes, goes), x)


def barrier(group: Group = None) -> None:
    """Wait for all members, between the collectives before it and those after it.

    Only collectives are ordered: XLA may move computation across a barrier.
    """
    calls = _calls_group(group)
    if calls.size() > 1:
        host_call(lambda _, __, ___: calls.barrier(), [], ordered=True, on_gpu=True, group=calls)


def _calls_group(group: Group) -> ProcessGroup:
    """Return the group that carries the calls of jitted programs on ``group``.

    They have one of their own: they happen when XLA gets to them, whatever the main thread calls
    meanwhile, and would otherwise mix with its calls.
    """
    internals()  # says, if need be, that this JAX is not tested
    base = resolve_process_group(group)
    if base.rank() < 0:
        raise ValueError(f"group: this rank is not a member of {base}")
    world = find_world()
    if world is not None and is_thread_world(world) and not internals().traces_are_own():
        raise RuntimeError(
            "this rank is a thread that shares its traces with other ranks; "
            "import jax before run_ranks is called"
        )
    return derived_group(base, "jit", f"{base.group_desc or base.id} in jit")


def _prepare(x: Any, group: Group) -> tuple[jax.Array, ProcessGroup]:
    x = jnp.asarray(x)
    if not isinstance(x.dtype, np.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"x has dtype {x.dtype}, which cannot be communicated")
    dtype_code(x.dtype)
    return x, _calls_group(group)


def _multiplied(x: jax.Array, op: Any) -> tuple[jax.Array, ReduceOp]:
    """Return what is to be reduced, and how, checked: a PREMUL_SUM is the SUM of products."""
    op = check_op(op, np.dtype(x.dtype))
    if op.kind is not RedOpType.PREMUL_SUM:
        return x, op
    return (x.reshape(-1) * jnp.asarray(op.factor, x.dtype)).reshape(x.shape), ReduceOp.SUM


def _check_axis(axis: int, ndim: int, name: str) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name} is {axis}; expected {-ndim} to {ndim - 1}")
    return axis % ndim


def _check_sizes(
    sizes: Sequence[int], x: jax.Array, axis: int, calls: ProcessGroup, tiled: bool
) -> tuple[int, ...]:
    """Return ``sizes`` as a tuple, which has this member's length of ``x`` in its place."""
    lengths = tuple(to_whole_number(size, f"sizes[{i}]") for i, size in enumerate(sizes))
    if not tiled:
        raise ValueError(f"sizes is {list(lengths)}, which goes with tiled=True only")
    if len(lengths) != calls.size() or min(lengths) < 0:
        raise ValueError(
            f"sizes is {list(lengths)}; expected a length >= 0 for each of {calls.size()} members"
        )
    if x.shape[axis] != lengths[calls.rank()]:
        raise ValueError(
            f"x has shape {x.shape}; expected {lengths[calls.rank()]} entries along dim {axis}, as"
            f" sizes {list(lengths)} say for member {calls.rank()}"
        )
    return lengths


def _split(x: jax.Array, axis: int, size: int, tiled: bool) -> jax.Array:
    """Return ``x`` with the members' parts along ``axis`` as dim 0."""
    if x.ndim == 0:
        raise ValueError(f"x has no dims; expected one with a part for each of {size} members")
    length = x.shape[axis]
    if not tiled:
        if length != size:
            raise ValueError(
                f"x has shape {x.shape}; expected {size} entries along dim {axis}, one for each "
                "member"
            )
        return jnp.moveaxis(x, axis, 0)
    if length % size:
        raise ValueError(f"x has shape {x.shape}; dim {axis} does not divide by the {size} members")
    shape = (*x.shape[:axis], size, length // size, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _pairs(perm: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    pairs = tuple((int(source), int(destination)) for source, destination in perm)
    for name, ranks in (
        ("sources", [source for source, _ in pairs]),
        ("destinations", [destination for _, destination in pairs]),
    ):
        strange = [rank for rank in ranks if not 0 <= rank < size]
        if strange:
            raise ValueError(f"perm has {name} {strange}; expected group ranks 0 to {size - 1}")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"perm has {name} more than once: {ranks}")
    return pairs
