"""Rules for products of arrays: a dim that is summed over and split gives partial sums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from meshlib.sharding._global_array import GlobalArray, ShardingError
from meshlib.sharding._local import as_array, dim_of
from meshlib.sharding._rules.align import (
    Label,
    align,
    belongs_nowhere,
    match_partial,
    one_mesh,
    stays_partial,
    summed_as,
)


def contract(
    name: str,
    function: Callable[..., Any],
    operands: Sequence[GlobalArray],
    labels: Sequence[Sequence[Label]],
    result: Sequence[Label],
    repeated: Collection[Label] = (),
) -> GlobalArray:
    """Return ``function`` of ``operands``, summed over the labels that ``result`` lacks.

    Dims of length 1 with one of the ``repeated`` labels are repeated along longer ones.
    """
    one_mesh(name, operands)
    lengths: dict[Label, int] = {}
    for x, own in zip(operands, labels, strict=True):
        for label, length in zip(own, x.shape, strict=True):
            known = lengths.setdefault(label, length)
            if known == 1 and label in repeated:
                lengths[label] = length
            elif length != known and not (length == 1 and label in repeated):
                raise ValueError(
                    f"{name}: shapes {[x.shape for x in operands]} do not fit: corresponding dims"
                    f" have lengths {known} and {length}"
                )
    dtype = np.result_type(*(x.dtype for x in operands))
    # Partial values of one operand are summed directly. Products reduce them first: a part may be
    # infinite where another operand is zero.
    single = len(operands) == 1 and stays_partial(operands[0], "sum", dtype)
    arrays, partial = match_partial(operands, single)
    aligned = align(name, arrays, labels)
    summed = [i for label, split in aligned.splits.items() if label not in result for i in split]
    op, wide = summed_as("sum", dtype, bool(summed))
    local = as_array(function(*(x.astype(wide, copy=False) for x in aligned.locals)))
    sharding = aligned.sharding(result, (*partial, *((i, op) for i in summed)))
    whole = type(operands[0])(local, sharding, [lengths[label] for label in result], local.dtype)
    return whole.astype(dtype, copy=False)


def matmul(a: Any, b: Any) -> GlobalArray:
    """Return ``a @ b``, with NumPy's rules for vectors and stacks of matrices."""
    a, b = _arrays("matmul", (a, b))
    if not a.ndim or not b.ndim:
        raise ValueError("matmul: an operand has no dims; use *")
    left = ("k",) if a.ndim == 1 else (*_stacked(a.ndim - 2), "m", "k")
    right = ("k",) if b.ndim == 1 else (*_stacked(b.ndim - 2), "k", "n")
    stacked = _stacked(max(a.ndim, b.ndim) - 2)
    result = (*stacked, *(("m",) if a.ndim > 1 else ()), *(("n",) if b.ndim > 1 else ()))
    return contract("matmul", np.matmul, (a, b), (left, right), result, stacked)


def dot(a: Any, b: Any) -> Any:
    """Return ``np.dot(a, b)``: as ``matmul`` for vectors and matrices, ``*`` for single values."""
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        # Unlike ``*``, np.dot gives a Python number NumPy's default dtype.
        first, second = (x if isinstance(x, GlobalArray) else np.asarray(x) for x in (a, b))
        return np.multiply(first, second)
    if np.ndim(a) > 2 or np.ndim(b) > 2:
        raise ShardingError("dot: more than 2 dims have no rule; use matmul or einsum")
    return matmul(a, b)


def einsum(operands: Sequence[Any], optimize: Any = False) -> GlobalArray:
    """Return ``np.einsum(*operands)``, subscripts as letters, without an ellipsis."""
    subscripts, *given = operands
    if not isinstance(subscripts, str) or "." in subscripts:
        raise ShardingError(
            f"einsum: {subscripts!r} has no rule; write a letter for each dim, as in 'ij,jk->ik'"
        )
    arrays = _arrays("einsum", given)
    # NumPy checks the letters, on arrays of one element each.
    np.einsum(subscripts, *(np.ones((1,) * x.ndim) for x in arrays))
    left, arrow, right = subscripts.replace(" ", "").partition("->")
    labels = left.split(",")
    for x, own in zip(arrays, labels, strict=True):
        if len({*zip(own, x.shape, strict=True)}) > len({*own}):
            raise ValueError(f"einsum: dims of {x!r} share a letter of {left!r} but not a length")
    if not arrow:
        letters = "".join(labels)
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    whole = f"{left}->{right}"
    # BLAS sums the same products if both operands have all summed letters.
    summed = {*left} - {*right, ","}
    optimize = optimize or (len(labels) == 2 and all(summed <= {*own} for own in labels))

    def function(*locals_: Any) -> Any:
        return np.einsum(whole, *locals_, optimize=optimize)

    return contract("einsum", function, arrays, labels, right, left)


def tensordot(a: Any, b: Any, axes: Any = 2) -> GlobalArray:
    """Return ``np.tensordot(a, b, axes)``."""
    a, b = _arrays("tensordot", (a, b))
    if np.ndim(axes) == 0:
        axes = (list(range(-axes, 0)), list(range(axes)))
    first, second = (
        [dim_of(one, x.ndim) for one in np.atleast_1d(own).tolist()]
        for x, own in zip((a, b), axes, strict=True)
    )
    if len(first) != len(second) or len({*first}) < len(first) or len({*second}) < len(second):
        raise ValueError(f"tensordot: axes {axes}; expected as many of each operand, each once")
    left: list[Label] = [("a", i) for i in range(a.ndim)]
    right: list[Label] = [("b", j) for j in range(b.ndim)]
    for i, j in zip(first, second, strict=True):
        right[j] = left[i]
    result = [label for label in (*left, *right) if label not in left or label not in right]

    def function(x: Any, y: Any) -> Any:
        return np.tensordot(x, y, (first, second))

    return contract("tensordot", function, (a, b), (left, right), result)


def vdot(a: Any, b: Any) -> GlobalArray:
    """Return the sum of ``conj(a) * b`` over all elements."""
    a, b = _arrays("vdot", (a, b))
    if a.shape != b.shape:
        a, b = np.ravel(a), np.ravel(b)
    dims = range(a.ndim)
    return contract("vdot", np.vdot, (a, b), (dims, dims), ())


def _stacked(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0)) if count > 0 else ()


def _arrays(name: str, operands: Sequence[Any]) -> list[GlobalArray]:
    """Return the operands; raise ShardingError unless all are DArrays."""
    mesh = next(x.mesh for x in operands if isinstance(x, GlobalArray))
    for x in operands:
        if not isinstance(x, GlobalArray):
            raise belongs_nowhere(name, x, mesh)
    return list(operands)
