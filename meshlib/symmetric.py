"""``empty``: arrays in memory that all members of a group share."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.group_of_ranks import GroupOfRanks
from transport.call import Call, Kind, dtype_code, dtype_name
from transport.communicator import Communicator
from transport.reduce_op import Flat

_MOST_DIMS = 64


class SymmetricMemory(GroupOfRanks):
    """Symmetric memory: the same array at the same place on every member."""

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike = np.float32,
        timeout: float | timedelta | None = None,
    ) -> npt.NDArray[Any] | None:
        """Return a NumPy array for which this group's collectives need no copy to be staged.

        Every member calls, with the same shape and dtype, and gets an array of its own; the
        contents are undefined. Where members share a host, all can reach all of these arrays, and a
        collective on them, or on the same contiguous part of them, works in place. Elsewhere they
        are ordinary arrays. Any use of an array is allowed; others' collectives see nothing of it
        until this member calls one as well.

        The memory is used again when the array and its views are gone on all members. Returns None
        on a rank that is no member. Raises ValueError, on all members, when they ask for different
        arrays; the group stays usable.
        """
        group = self.process_group
        rank = group.rank()
        if rank < 0:
            return None
        dims = _check_shape(shape)
        wanted = np.dtype(dtype)
        code = dtype_code(wanted)
        count = math.prod(dims)

        def run(communicator: Communicator, call: Call) -> Flat | list[str]:
            mine = _describe(code, dims)
            asked = np.empty((len(group.ranks), mine.size), mine.dtype)
            communicator.all_gather(call, list(asked), mine)
            if (asked == mine).all():
                return communicator.allocate(call, count, wanted)
            return [_show(row) for row in asked]

        result = group.issue(
            Kind.ALLOCATE,
            run,
            nbytes=count * wanted.itemsize,
            timeout=self.call_timeout(timeout),
        )
        if isinstance(result, np.ndarray):
            return result.reshape(dims)
        rows = "".join(f"\n  rank {r}: {a}" for r, a in zip(group.ranks, result, strict=True))
        raise ValueError(f"the members of {group} ask for different symmetric arrays:{rows}")


def _check_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        dims = (
            (operator.index(shape),)
            if not isinstance(shape, Sequence)
            else tuple(operator.index(dim) for dim in shape)
        )
    except TypeError:
        raise TypeError(f"shape is {shape!r}; expected an integer or a sequence of them") from None
    if len(dims) > _MOST_DIMS or any(dim < 0 for dim in dims):
        raise ValueError(
            f"shape is {shape!r}; expected at most {_MOST_DIMS} dimensions, none negative"
        )
    return dims


def _describe(code: int, dims: tuple[int, ...]) -> npt.NDArray[np.int64]:
    row = np.zeros(2 + _MOST_DIMS, np.int64)
    row[0], row[1] = code, len(dims)
    row[2 : 2 + len(dims)] = dims
    return row


def _show(row: npt.NDArray[np.int64]) -> str:
    dims = tuple(int(dim) for dim in row[2 : 2 + int(row[1])])
    return f"shape {dims}, dtype {dtype_name(int(row[0]))}"
