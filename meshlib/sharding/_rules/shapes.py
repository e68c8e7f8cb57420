"""Rules for functions that only rearrange an array: each rank rearranges its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from operator import index as to_int
from typing import Any

import numpy as np

from meshlib.sharding._global_array import A, GlobalArray, ShardingError
from meshlib.sharding._local import array_module, dim_of
from meshlib.sharding._rules.align import align, match_partial
from meshlib.sharding._sharding import Sharding


def moved(function: Callable[..., Any]) -> Callable[..., GlobalArray]:
    """Return the rule of a NumPy function that moves whole dims, or adds dims of length 1."""

    def rule(a: GlobalArray, **options: Any) -> GlobalArray:
        # NumPy checks the arguments. Here dim d has length d + 2, which identifies it afterwards.
        numbered = np.broadcast_to(np.empty((), bool), range(2, a.ndim + 2))
        sources = [length - 2 for length in function(numbered, **options).shape]
        dims = [a.sharding.split_of(d) if d >= 0 else () for d in sources]
        lengths = [a.shape[d] if d >= 0 else 1 for d in sources]
        return _like(a, function(a.local, **options), dims, lengths)

    return rule


def squeeze(a: GlobalArray, axis: Any = None) -> GlobalArray:
    """Return ``a`` without dims of length 1: all of them, or those at ``axis``."""
    np.squeeze(np.broadcast_to(np.empty((), bool), a.shape), axis)  # checks the axis
    if axis is None:
        gone = {d for d, length in enumerate(a.shape) if length == 1}
    else:
        gone = {one % a.ndim for one in (axis if isinstance(axis, tuple) else (axis,)) if a.ndim}
    for d in gone:
        if a.sharding.split_of(d):
            raise _split("squeeze", a, d)
    kept = [d for d in range(a.ndim) if d not in gone]
    local = a.local.reshape([a.local.shape[d] for d in kept])
    return _like(a, local, [a.sharding.split_of(d) for d in kept], [a.shape[d] for d in kept])


def reshape(a: GlobalArray, shape: Any, order: str = "C") -> GlobalArray:
    """Return ``a`` in another ``shape``, in which each rank's part must stay one part.

    Of dims that merge, or that one dim divides into, only the outermost may be split, evenly.
    """
    if order != "C":
        raise ShardingError(f"reshape: order={order!r} has no rule; expected 'C'")
    # NumPy checks the lengths, and infers a length of -1.
    wanted = np.broadcast_to(np.empty((), bool), a.shape).reshape(shape).shape
    dims: list[tuple[int, ...]] = [()] * len(wanted)
    for old_run, new_run in _runs(a.shape, wanted):
        # Dims of length 1 do not affect the order of elements.
        first = next((d for d in old_run if a.shape[d] != 1), old_run[0] if old_run else None)
        into = next((k for k in new_run if wanted[k] != 1), new_run[0] if new_run else None)
        for d in old_run:
            split = a.sharding.split_of(d)
            if not split:
                continue
            n = prod(a.mesh.shape[i] for i in split)
            same = into is not None and wanted[into] == a.shape[d]
            even = into is not None and a.shape[d] % n == wanted[into] % n == 0
            if d == first and into is not None and (same or even):
                dims[into] = split
            else:
                raise ShardingError(
                    f"reshape: {a!r} to {wanted}: dim {d} is split {n} ways, and its parts are not"
                    " parts of the result; redistribute it first, such as to"
                    f" {_without(a, d)}"
                )
    target = Sharding.of_positions(a.mesh, dims, a.sharding.partial_dims)
    local = a.local.reshape(target.local_shape(wanted))
    return type(a)(local, target, wanted, a.dtype)


def ravel(a: GlobalArray, order: str = "C") -> GlobalArray:
    """Return ``a`` with one dim; see ``reshape``."""
    return reshape(a, -1, order)


def select(x: A, index: Any) -> A:
    """Return ``x[index]``, a view, for integers, slices, None and an ellipsis.

    A split dim needs a whole slice.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    for entry in entries:
        if not (entry is None or entry is ... or isinstance(entry, slice)) and _not_integer(entry):
            raise ShardingError(
                f"indexing with {entry!r} has no rule; expected integers, slices, None and ..."
                " (full_array() returns the whole array)"
            )
    # NumPy checks the index, and finds the shape.
    shape = np.broadcast_to(np.empty((), bool), x.shape)[index].shape
    given = sum(entry is not None and entry is not ... for entry in entries)
    at = entries.index(...) if ... in entries else len(entries)
    entries[at : at + 1] = [slice(None)] * (x.ndim - given)
    dims: list[tuple[int, ...]] = []
    here: list[Any] = []
    d = 0
    for entry in entries:
        if entry is None:
            dims.append(())
            here.append(None)
            continue
        split, length = x.sharding.split_of(d), x.shape[d]
        is_slice = isinstance(entry, slice)
        is_whole = is_slice and range(*entry.indices(length)) == range(length)
        if split and not is_whole:
            raise _split("indexing", x, d)
        if is_slice:
            dims.append(split)
        # A whole slice selects all of this rank's part.
        here.append(slice(None) if is_whole else entry)
        d += 1
    return _like(x, x.local[(*here, ...)], dims, shape)


def assign(x: GlobalArray, index: Any, value: Any) -> None:
    """Assign a single value, or a DArray that needs no redistribution, to ``x[index]``."""
    if x.sharding.partial_dims:
        raise ShardingError(f"assigning to {x!r}, whose values are partial; use reduced() first")
    part = select(x, index)
    if isinstance(value, GlobalArray):
        value = value.reduced()
        entries = index if isinstance(index, tuple) else (index,)
        element = not part.ndim and ... not in entries  # NumPy needs a single value for it
        while value.ndim > part.ndim and value.shape[0] == 1 and not element:
            value = select(value, 0)
        pairs = zip(value.shape[::-1], part.shape[::-1], strict=False)
        if value.ndim > part.ndim or any(n not in (1, length) for n, length in pairs):
            raise ValueError(f"assigning: {value!r} does not fit {part!r}")
        labels = [range(part.ndim), range(part.ndim - value.ndim, part.ndim)]
        aligned = align("assigning", [part, value], labels)
        if aligned.sharding(range(part.ndim)) != part.sharding:
            raise ShardingError(
                f"assigning: {value!r} is split where {part!r} is not; redistribute it to"
                f" {part.sharding.spec}"
            )
        value = aligned.locals[1]
    elif np.ndim(value):
        raise ShardingError(
            "assigning: the value is an array that belongs to no mesh; use distribute_array"
        )
    part.local[...] = value


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> GlobalArray:
    """Return the arrays joined along ``axis``, which may not be split."""
    operands = _all_arrays("concatenate", arrays)
    if axis is None:
        operands, axis = [ravel(x) for x in operands], 0
    dtype = np.result_type(*(x.dtype for x in operands))
    operands, partial = match_partial(operands, all(x.dtype == dtype for x in operands))
    ndim = operands[0].ndim
    if not ndim:
        raise ValueError("concatenate: arrays without dims cannot be joined")
    axis = dim_of(axis, ndim)
    labels: list[list[Any]] = []
    for number, x in enumerate(operands):
        if x.ndim != ndim or any(
            a != b
            for d, (a, b) in enumerate(zip(x.shape, operands[0].shape, strict=False))
            if d != axis
        ):
            raise ValueError(f"concatenate: shapes {[one.shape for one in operands]} do not fit")
        if x.sharding.split_of(axis):
            raise _split("concatenate", x, axis)
        labels.append([(d, number) if d == axis else d for d in range(ndim)])
    aligned = align("concatenate", operands, labels)
    local = array_module(aligned.locals[0]).concatenate(aligned.locals, axis=axis)
    shape = list(operands[0].shape)
    shape[axis] = sum(x.shape[axis] for x in operands)
    return type(operands[0])(local, aligned.sharding(range(ndim), partial), shape, local.dtype)


def stack(arrays: Sequence[Any], axis: int = 0) -> GlobalArray:
    """Return the arrays, of one shape, joined along a new dim."""
    operands = _all_arrays("stack", arrays)
    return concatenate(
        [np.expand_dims(x, axis) for x in operands], dim_of(axis, operands[0].ndim + 1)
    )


def _like(x: A, local: Any, dims: Sequence[tuple[int, ...]], shape: Sequence[int]) -> A:
    sharding = Sharding.of_positions(x.mesh, dims, x.sharding.partial_dims)
    return type(x)(local, sharding, shape, x.dtype)


def _not_integer(entry: Any) -> bool:
    if isinstance(entry, (bool, np.bool_)) or np.ndim(entry):
        return True
    try:
        to_int(entry)
    except TypeError:
        return True
    return False


def _without(x: GlobalArray, array_dim: int) -> Any:
    dims = [() if d == array_dim else x.sharding.split_of(d) for d in range(x.ndim)]
    return Sharding.of_positions(x.mesh, dims).spec


def _split(name: str, x: GlobalArray, array_dim: int) -> ShardingError:
    return ShardingError(
        f"{name}: dim {array_dim} of {x!r} is split; redistribute it first, such as to"
        f" {_without(x, array_dim)}"
    )


def _all_arrays(name: str, arrays: Sequence[Any]) -> list[GlobalArray]:
    operands = list(arrays)
    if not operands or not all(isinstance(x, GlobalArray) for x in operands):
        raise ShardingError(f"{name}: expected a list of DArrays, got {operands!r}")
    return operands


def _runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the shortest runs of dims of ``old`` and ``new`` that have equal products."""
    if prod(old) == 0:
        return _runs_of_empty(old, new)
    runs: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        old_run, new_run = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = prod(old[k] for k in old_run), prod(new[k] for k in new_run)
        i, j = i + len(old_run), j + len(new_run)
        while a != b:
            if a < b:
                old_run.append(i)
                a, i = a * old[i], i + 1
            else:
                new_run.append(j)
                b, j = b * new[j], j + 1
        runs.append((old_run, new_run))
    return runs


def _runs_of_empty(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the equal leading dims of empty arrays one by one, and all other dims in one run."""
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    rest = (list(range(same, len(old))), list(range(same, len(new))))
    return [*(([d], [d]) for d in range(same)), *([rest] if rest[0] or rest[1] else [])]
