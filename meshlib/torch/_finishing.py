"""Steps after a call, as a ``Finish``, that torch's backends perform and meshlib does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshlib._calls.work import Work, when_all
from meshlib.torch._tensors import Array
from transport._operands.reduce_op import ReduceOp

Finish = Callable[[], object]
"""A function that changes a call's outputs after the call has succeeded."""


def average_of_integers(
    op: ReduceOp, inputs: Sequence[Array], outputs: Sequence[Array], size: int
) -> tuple[ReduceOp, Finish | None]:
    """Return the op for ``inputs``, and the last step for an average of integers (else None).

    As in torch's backends, this average is the sum divided by ``size``, rounded towards zero.
    """
    if op != ReduceOp.AVG or not any(np.issubdtype(x.dtype, np.integer) for x in inputs):
        return op, None

    def divide() -> None:
        for x in outputs:
            if np.issubdtype(x.dtype, np.integer):
                np.subtract(x, np.fmod(x, size), out=x)
                np.floor_divide(x, size, out=x)
            else:  # coalesced with integers
                np.divide(x, size, out=x)

    return ReduceOp.SUM, divide


def without_repeats(outputs: Sequence[Array]) -> tuple[Sequence[Array], Finish | None]:
    """Return distinct arrays for a call to write, and a function that copies them to ``outputs``.

    If ``outputs`` repeats an array (``[buffer] * n``), the array gets the last values, as with
    Gloo. Otherwise return ``outputs`` and None.
    """
    if len({x.__array_interface__["data"][0] for x in outputs}) == len(outputs):
        return outputs, None
    parts = [np.empty_like(x) for x in outputs]

    def copy() -> None:
        for out, part in zip(outputs, parts, strict=True):
            out[...] = part

    return parts, copy


def finished(work: Work[Any], finish: Finish) -> Work[Any]:
    """Return a Work that runs ``finish()`` after ``work``, before the group's next call."""

    def end() -> Any:
        finish()
        return work.result()

    return when_all([work], lambda: repr(work), end)
