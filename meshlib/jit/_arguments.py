"""Checks of the public functions' arguments, and the group that carries their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshlib._arrays.checks import check_op
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import (
    Group,
    derived_group,
    find_world,
    is_thread_world,
    resolve_process_group,
)
from meshlib.jit._xla.host_calls import internals
from transport._calls.codes import dtype_code
from transport._checks import to_whole_number
from transport._operands.reduce_op import RedOpType, ReduceOp


def calls_group(group: Group) -> ProcessGroup:
    """Return the group that carries the calls of jitted programs on ``group``.

    It is a derived group: XLA chooses the moment of a program's calls, which must not match the
    main thread's calls on ``group``. Raises ValueError on a rank that is not a member.
    """
    internals()  # raises for an untested version of JAX
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


def prepare(x: Any, group: Group) -> tuple[jax.Array, ProcessGroup]:
    """Return ``x`` as a JAX array, and the group that carries its call.

    Raises TypeError for a dtype that cannot be communicated.
    """
    x = jnp.asarray(x)
    if not isinstance(x.dtype, np.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"x has dtype {x.dtype}, which cannot be communicated")
    dtype_code(x.dtype)
    return x, calls_group(group)


def multiplied(x: jax.Array, op: Any) -> tuple[jax.Array, ReduceOp]:
    """Return the array and checked op of a reduction; a PREMUL_SUM becomes a SUM of products."""
    op = check_op(op, np.dtype(x.dtype))
    if op.kind is not RedOpType.PREMUL_SUM:
        return x, op
    return (x.reshape(-1) * jnp.asarray(op.factor, x.dtype)).reshape(x.shape), ReduceOp.SUM


def check_axis(axis: int, ndim: int, name: str) -> int:
    """Return ``axis`` counted from 0; raise ValueError, which names ``name``, if out of range."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"{name} is {axis}; expected {-ndim} to {ndim - 1}")
    return axis % ndim


def check_sizes(
    sizes: Sequence[int], x: jax.Array, axis: int, calls: ProcessGroup, tiled: bool
) -> tuple[int, ...]:
    """Return ``sizes`` as a tuple.

    Raises ValueError unless ``tiled``, for a wrong number of sizes, and when this member's size is
    not the length of ``x`` along ``axis``.
    """
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


def split_rows(x: jax.Array, axis: int, size: int, tiled: bool) -> jax.Array:
    """Return ``x`` with the members' parts along ``axis`` moved to dim 0.

    Raises ValueError when ``axis`` does not have a part for each of ``size`` members.
    """
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


def is_tree(x: Any) -> bool:
    """Return whether ``x`` is a pytree other than a single leaf."""
    leaves, structure = jax.tree_util.tree_flatten(x)
    return bool(leaves) and not jax.tree_util.treedef_is_leaf(structure)


def in_one_call(call: Callable[[jax.Array], jax.Array], tree: Any, group: Group) -> Any:
    """Return ``tree`` with ``call`` applied to its leaves, in one call per dtype."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    arrays = [prepare(leaf, group)[0] for leaf in leaves]
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
