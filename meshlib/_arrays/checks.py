"""Checks of collectives' arguments; errors name the argument, its value and the expected value."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np

from meshlib._arrays import adapter as arrays
from meshlib._arrays.adapted import AdaptedArray, ListOf
from meshlib._arrays.ignored import warn_if_discarded
from transport._calls.codes import dtype_code
from transport._checks import to_whole_numbers
from transport._cuda.flat import DeviceFlat
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp


def check_op(
    op: object, dtype: np.dtype[Any], count: int | None = None, feedback: bool = False
) -> ReduceOp:
    """Return ``op`` as a ReduceOp that applies to ``dtype``; raise TypeError otherwise.

    Raises ValueError when it does not apply to ``count`` elements (None: unknown), and for an op
    with error feedback unless the call supports ``feedback``.
    """
    if isinstance(op, RedOpType):
        op = ReduceOp(op)
    if not isinstance(op, ReduceOp):
        raise TypeError(f"op must be a ReduceOp such as ReduceOp.SUM, got {op!r}")
    if op.residual is not None and not feedback:
        raise ValueError(f"op {op!r} has error feedback, which is for all_reduce of one array")
    op.check(dtype, count)
    return op


def check_reduction(
    op: object, x: AdaptedArray, name: str, count: int | None = None, feedback: bool = False
) -> tuple[ReduceOp, int]:
    """Return ``op`` as a ReduceOp that applies to ``x``, and the wire code of the dtype of ``x``.

    ``count`` is the number of elements; None means that of ``x``. ``feedback`` is whether the call
    supports an op with error feedback. Raises the errors of ``check_dtype`` and ``check_op``.
    """
    if type(op) is ReduceOp and (code := op.codes.get(x.flat.dtype)) is not None:
        return op, code
    check_dtype(x, name)
    checked = check_op(op, x.flat.dtype, x.flat.size if count is None else count, feedback)
    return checked, checked.code_of(x.flat.dtype)


def check_dtype(x: AdaptedArray, name: str) -> int:
    """Return the wire code of the dtype of ``x``; raise TypeError for a dtype without one."""
    try:
        return dtype_code(x.flat.dtype)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def check_same_dtype(x: AdaptedArray, name: str, y: AdaptedArray, other: str) -> None:
    """Raise TypeError unless both have one dtype, ValueError unless they are on one device."""
    if place(x) != place(y):
        raise ValueError(
            f"{name} is on {place(x)} but {other} is on {place(y)}; expected the same device"
        )
    if x.flat.dtype != y.flat.dtype:
        raise TypeError(
            f"{name} has dtype {x.flat.dtype} but {other} has {y.flat.dtype}; expected the same"
        )


def check_size(x: AdaptedArray, name: str, expected: int, why: str) -> None:
    """Raise ValueError unless ``x`` has ``expected`` elements."""
    if x.flat.size != expected:
        raise ValueError(
            f"{name} has {x.flat.size} elements (shape {x.shape}); expected {expected}: {why}"
        )


def check_list(
    items: object, name: str, size: int | None = None, each: str = "one for each member"
) -> None:
    """Raise unless ``items`` is a list with ``size`` entries (None: at least one).

    ``each`` explains the expected length.
    """
    check_sequence(items, name)
    assert isinstance(items, Sequence)
    if size is None:
        if not items:
            raise ValueError(f"{name} is empty; expected at least one entry")
    elif len(items) != size:
        raise ValueError(f"{name} has {len(items)} entries; expected {size}, {each}")


def check_sequence(items: object, name: str) -> None:
    """Raise TypeError unless ``items`` is a sequence other than a string or bytes."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be a list, got {type(items).__name__}")


def check_fillable(items: object, name: str, size: int | None = None) -> None:
    """Raise unless ``items`` is a list with ``size`` entries (None: any number) to be replaced."""
    if not isinstance(items, MutableSequence) or isinstance(items, bytearray):
        raise TypeError(
            f"{name} must be a list, whose entries are replaced; got {type(items).__name__}"
        )
    if size is not None:
        check_list(items, name, size)


def check_no_overlap(x: AdaptedArray, name: str, y: AdaptedArray, other: str) -> None:
    """Raise ValueError when two buffers share memory; the call would overwrite its own input."""
    if overlap(x.flat, y.flat):
        raise ValueError(f"{name} overlaps {other} in memory; expected separate arrays")


def same_start(x: Flat, y: Flat) -> bool:
    """Return whether two buffers begin at one address, as for an operation in place."""
    # The overlap test is faster, and usually false.
    return overlap(x, y) and address(x) == address(y)


def check_disjoint(items: Sequence[AdaptedArray], name: str) -> None:
    """Raise ValueError when two of the outputs ``items`` share memory."""
    if len(items) < 2:
        return
    spans = [(address(x.flat), i) for i, x in enumerate(items) if x.flat.size]
    spans.sort()
    for (start, i), (after, j) in pairwise(spans):
        if start + items[i].flat.nbytes > after:
            low, high = sorted((i, j))
            raise ValueError(
                f"{name} has entries that share memory (number {low} and {high}); expected "
                "separate arrays"
            )


def place(x: AdaptedArray) -> str:
    """Return the device of an array: ``cpu``, or ``cuda:0`` and so on."""
    flat: object = x.flat
    return f"{x.device}:{flat.device}" if isinstance(flat, DeviceFlat) else x.device


def address(flat: Flat | DeviceFlat) -> int:
    """Return the address of a flat buffer."""
    if isinstance(flat, DeviceFlat):
        return flat.pointer
    return flat.__array_interface__["data"][0]


def overlap(x: Flat | DeviceFlat, y: Flat | DeviceFlat) -> bool:
    """Return whether two flat buffers share memory."""
    if not isinstance(x, DeviceFlat) and not isinstance(y, DeviceFlat):
        return np.may_share_memory(x, y)  # exact for buffers without gaps
    start, other = address(x), address(y)
    return start < other + y.nbytes and other < start + x.nbytes and bool(x.size and y.size)


def adapt_sources(items: ListOf[Any], name: str, size: int | None = None) -> list[AdaptedArray]:
    """Adapt a list of ``size`` arrays (None: at least one) that are read."""
    entries = _entries(items, size)
    check_list(entries, name, size)
    return [arrays.source(item, f"{name}[{i}]") for i, item in enumerate(entries)]


def adapt_targets(
    items: ListOf[Any],
    name: str,
    size: int | None = None,
    each: str = "one for each member",
    *,
    keep: bool = False,
) -> list[AdaptedArray]:
    """Adapt a list of ``size`` arrays (None: at least one) that are written.

    ``each`` explains the expected length. With ``keep``, the call also reads their contents. In a
    mutable list, new arrays replace the read-only ones after the call.
    """
    entries = _entries(items, size)
    check_list(entries, name, size, each)
    adapt = arrays.in_out if keep else arrays.target
    adapted = [adapt(item, f"{name}[{i}]") for i, item in enumerate(entries)]
    check_disjoint(adapted, name)
    immutable = [i for i, x in enumerate(adapted) if x.returned_only]
    if immutable and isinstance(items, MutableSequence):
        for i in immutable:
            adapted[i].put_back(partial(items.__setitem__, i))
    elif immutable:
        warn_if_discarded()
    return adapted


def _entries(items: ListOf[Any], size: int | None) -> Sequence[Any]:
    """Return ``items``, or for an array and a ``size`` its parts along the first axis."""
    if type(items) is list or size is None or not getattr(items, "ndim", 0):
        return cast(Sequence[Any], items)
    return [cast(Any, items)[i, ...] for i in range(len(items))]


def split_evenly(flat: Flat, parts: int) -> list[Flat]:
    """Return ``parts`` views of equal size, in order."""
    step = flat.size // parts
    return [flat[i * step : (i + 1) * step] for i in range(parts)]


def split_by_rows(
    x: AdaptedArray, sizes: Sequence[int] | None, name: str, sizes_name: str, members: int
) -> list[Flat]:
    """Return a view for each member: ``sizes`` counts rows of dim 0; None means equal parts.

    Raises ValueError if the sizes do not add up to dim 0, or if dim 0 cannot be divided equally.
    Raises TypeError for sizes that are not integers.
    """
    rows = x.shape[0] if x.shape else 1
    counts = [] if sizes is None else to_whole_numbers(sizes, sizes_name)
    if not counts:
        if rows % members:
            raise ValueError(
                f"{name} has {rows} rows (shape {x.shape}), which {members} members cannot share "
                f"equally; expected a multiple of {members}, or {sizes_name}"
            )
        return split_evenly(x.flat, members)
    if len(counts) != members or any(n < 0 for n in counts) or sum(counts) != rows:
        raise ValueError(
            f"{sizes_name} is {counts} (sum {sum(counts)}); expected {members} numbers >= 0 "
            f"that add up to the {rows} rows of {name}"
        )
    row = x.flat.size // rows if rows else 0
    ends = np.cumsum([0, *counts]) * row
    return [x.flat[ends[i] : ends[i + 1]] for i in range(members)]
