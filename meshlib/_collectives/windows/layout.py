"""The layout of the members' arrays in a window, and the checks of a call's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlib._arrays.adapter import source
from transport._calls.codes import dtype_code
from transport._checks import to_whole_number
from transport._operands.reduce_op import Flat, ReduceOp
from transport._windows.memory import DTYPES, OPS, WORD

# Each member's memory begins with the lock and one signal counter for each member.
_ALIGNMENT = 64


class WindowLayout:
    """The layout of the members' arrays: rank ``ranks[i]`` has ``counts[i]`` elements."""

    def __init__(self, ranks: Sequence[int], dtype: np.dtype[Any], counts: Sequence[int]) -> None:
        self.ranks = ranks
        self.dtype = dtype
        self.counts = counts
        words = (1 + len(ranks)) * WORD.itemsize
        self.begin: int = -(-words // _ALIGNMENT) * _ALIGNMENT
        """The offset of each array in its memory, in bytes."""

    def nbytes(self, place: int) -> int:
        """Return the size of a member's memory, in bytes."""
        return self.begin + self.counts[place] * self.dtype.itemsize

    def at(self, offset: int, count: int, place: int) -> int:
        """Return the byte offset of ``count`` elements from ``offset`` on.

        Raises ValueError for elements outside the array of the member ``place``.
        """
        begin, size = to_whole_number(offset, "offset"), self.counts[place]
        if begin < 0 or count < 0 or begin + count > size:
            raise ValueError(
                f"offset is {begin} for {count} elements; expected elements within the {size}"
                f" of rank {self.ranks[place]}'s array"
            )
        return self.begin + begin * self.dtype.itemsize

    def flat(self, values: Any, name: str) -> Flat:
        """Return ``values``, numbers or an array of the window's dtype, as a flat buffer.

        Raises TypeError for another dtype, ValueError for numbers that do not fit.
        """
        dtype = self.dtype
        if not hasattr(values, "dtype"):
            found = np.asarray(values)
            if not np.can_cast(found.dtype, dtype, "same_kind") and found.dtype.kind not in "iu":
                raise TypeError(f"{name} is {values!r}; expected {dtype.name}, the window's dtype")
            try:
                return np.asarray(values, dtype).ravel()
            except OverflowError as error:
                raise ValueError(f"{name} is {values!r}; expected {dtype.name}: {error}") from None
        flat = on_cpu(values, name)
        if flat.dtype != dtype:
            text = f"{name} has dtype {flat.dtype.name}; expected {dtype.name}, the window's"
            raise TypeError(text)
        return flat

    def element(self, value: Any, name: str) -> bytes:
        """Return the bytes of one element. Raises ``flat``'s errors, and ValueError for several."""
        flat = self.flat(value, name)
        if flat.size != 1:
            raise ValueError(f"{name} has {flat.size} elements; expected 1")
        return flat.tobytes()

    def code(self) -> int:
        """Return the code of the dtype. Raises TypeError if the dtype supports no updates."""
        code = dtype_code(self.dtype)
        if code not in DTYPES:
            names = ", ".join(known.name for known in DTYPES.values())
            text = f"a window of {self.dtype.name} supports only put and get"
            raise TypeError(f"{text}; expected one of {names}")
        return code

    def op(self, op: ReduceOp) -> int:
        """Return the code of ``op``. Raises TypeError if the dtype does not support it."""
        if not isinstance(op, ReduceOp) or op.code not in OPS:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"op is {op!r}; expected one of {', '.join(map(repr, OPS.values()))}")
        op.check(self.dtype)
        return op.code


def signals_of(place: int) -> int:
    """Return the byte offset of the counter of signals from the member ``place``."""
    return (1 + place) * WORD.itemsize


def on_cpu(array: Any, name: str) -> Flat:
    """Return ``array`` as a flat buffer. Raises TypeError unless it is an array on the CPU."""
    adapted = source(array, name)
    if adapted.device != "cpu":
        raise TypeError(f"{name} is on {adapted.device}; expected an array on the CPU")
    return adapted.flat
