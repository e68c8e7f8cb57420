"""Rules for products of arrays: a dim that is summed over and split gives partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshlib.sharding.darray import DArray, ShardingError
from meshlib.sharding.local import as_array
from meshlib.sharding.rules.align import Label, align, belongs_nowhere, one_mesh, settled, unwrapped


def contract(
    name: str,
    function: Callable[..., Any],
    operands: Sequence[DArray],
    labels: Sequence[Sequence[Label]],
    result: Sequence[Label],
) -> DArray:
    """Return ``function`` of ``operands``, summed over the labels that ``result`` lacks."""
    arrays, partial = settled(unwrapped(operands, np.result_type(*(x.dtype for x in operands))))
    one_mesh(name, arrays)
    lengths: dict[Label, int] = {}
    for x, own in zip(arrays, labels, strict=True):
        for label, length in zip(own, x.shape, strict=True):
            known = lengths.setdefault(label, length)
            if known == 1:
                lengths[label] = length
            elif length not in (1, known):
                raise ValueError(
                    f"{name}: shapes {[x.shape for x in arrays]} do not fit: {known} and {length}"
                    " are to run together"
                )
    aligned = align(name, arrays, labels)
    local = as_array(function(*aligned.locals))
    summed = [i for label, split in aligned.splits.items() if label not in result for i in split]
    left = (*partial, *((i, "sum") for i in summed))
    sharding = aligned.sharding(result, left)
    return DArray(local, sharding, [lengths[label] for label in result], local.dtype)


def matmul(a: Any, b: Any) -> DArray:
    """Return ``a @ b``, with NumPy's rules for vectors and stacks of matrices."""
    a, b = _arrays("matmul", (a, b))
    if not a.ndim or not b.ndim:
        raise ValueError("matmul: an operand has no dims; use *")
    left = ("k",) if a.ndim == 1 else (*_stacked(a.ndim - 2), "m", "k")
    right = ("k",) if b.ndim == 1 else (*_stacked(b.ndim - 2), "k", "n")
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(f"matmul: shapes {a.shape} and {b.shape} do not fit")
    stacked = _stacked(max(a.ndim, b.ndim) - 2)
    result = (*stacked, *(("m",) if a.ndim > 1 else ()), *(("n",) if b.ndim > 1 else ()))
    return contract("matmul", np.matmul, (a, b), (left, right), result)


def dot(a: Any, b: Any) -> Any:
    """Return ``np.dot(a, b)``: as ``matmul`` for vectors and matrices, ``*`` for single values."""
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return np.multiply(a, b)
    if np.ndim(a) > 2 or np.ndim(b) > 2:
        raise ShardingError("dot: of more than 2 dims it has no rule; use matmul or einsum")
    return matmul(a, b)


def einsum(subscripts: str, *operands: Any) -> DArray:
    """Return ``np.einsum(subscripts, *operands)``, subscripts as letters, without an ellipsis."""
    if not isinstance(subscripts, str) or "." in subscripts:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardingError(
            f"einsum: {subscripts!r} has no rule; write a letter for each dim, as in 'ij,jk->ik'"
        )
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    labels = left.split(",")
    arrays = _arrays("einsum", operands)
    if [len(own) for own in labels] != [x.ndim for x in arrays]:
        raise ValueError(
            f"einsum: {subscripts!r} does not fit the shapes {[x.shape for x in arrays]}"
        )
    if not arrow:
        letters = "".join(labels)
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    whole = f"{left}->{right}"

    def function(*locals_: Any) -> Any:
        return np.einsum(whole, *locals_, optimize=len(locals_) > 1)

    return contract("einsum", function, arrays, labels, right)


def tensordot(a: Any, b: Any, axes: Any = 2) -> DArray:
    """Return ``np.tensordot(a, b, axes)``."""
    a, b = _arrays("tensordot", (a, b))
    if isinstance(axes, int):
        pairs = list(zip(range(a.ndim - axes, a.ndim), range(axes), strict=True))
    else:
        first, second = (np.atleast_1d(own).tolist() for own in axes)
        pairs = [(i % a.ndim, j % b.ndim) for i, j in zip(first, second, strict=True)]
    left: list[Label] = [("a", i) for i in range(a.ndim)]
    right: list[Label] = [("b", j) for j in range(b.ndim)]
    for i, j in pairs:
        right[j] = left[i]
    over = {left[i] for i, _ in pairs}
    result = [label for label in (*left, *right) if label not in over]
    where = ([i for i, _ in pairs], [j for _, j in pairs])

    def function(x: Any, y: Any) -> Any:
        return np.tensordot(x, y, where)

    return contract("tensordot", function, (a, b), (left, right), result)


def vdot(a: Any, b: Any) -> Any:
    """Return the sum of the products of the elements of ``a``, conjugated, and ``b``."""
    products = np.multiply(np.conjugate(a), b)
    # NumPy's sum alone would be of a wider type.
    return np.sum(products, dtype=None if products.dtype == bool else products.dtype)


def _stacked(count: int) -> tuple[int, ...]:
    return tuple(range(-count, 0)) if count > 0 else ()


def _arrays(name: str, operands: Sequence[Any]) -> list[DArray]:
    """Return the operands; raise ShardingError unless all are DArrays."""
    mesh = next(x.mesh for x in operands if isinstance(x, DArray))
    for x in operands:
        if not isinstance(x, DArray):
            raise belongs_nowhere(name, x, mesh)
    return list(operands)
