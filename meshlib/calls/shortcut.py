"""The numbers that a group gives its collectives, and the shortcut that gives them, too."""

from __future__ import annotations

from typing import Any, Protocol

from meshlib.calls.spec import CallSpec, InPlace
from transport.call import Call, Kind, history_after, pack_header
from transport.communicators.base import Communicator
from transport.native import core
from transport.operands.reduce_op import ReduceOp

SHORT = frozenset(
    () if core is None else set(Kind) - {Kind.SEND, Kind.RECV, Kind.ALLOCATE, Kind.SPLIT}
)
"""Kinds of calls after which it is worth to look whether there is a shortcut."""


class Shortcut(Protocol):
    """Opens the usual calls of a group in compiled code, as ``Door.issue`` would, and makes the
    small ones.

    What has to wait long, or goes wrong, goes on in ``Door``, and raises as ever. NotImplemented is
    for a call that is not the usual one: nothing has happened then.
    """

    checked: bool
    """Set to False to measure what recording and comparing cost. For nothing else."""

    def issue(self, what: CallSpec | InPlace, seconds: float, /) -> Any:
        """Make the call and return what it returns, or NotImplemented."""
        ...


class CallOrder:
    """``sequence`` is the number of the last collective, ``history`` what ``CallHeader`` says."""

    __slots__ = ("history", "sequence")

    def __init__(self) -> None:
        self.sequence: int = 0
        self.history: int = 0

    def next_header(self, spec: CallSpec, /) -> bytes:
        """Number the collective ``spec`` and return its header, packed (see ``CallHeader``)."""
        sequence, history = self.sequence + 1, self.history
        packed = pack_header(
            sequence,
            spec.elements,
            spec.root,
            spec.kind,
            spec.dtype,
            spec.op,
            0,
            history,
            spec.extra,
        )
        self.sequence, self.history = sequence, history_after(packed)
        return packed


Order: type[CallOrder] = CallOrder if core is None else core.Order


def open_shortcut(
    communicator: Communicator, of_group: tuple[Any, ...], of_rank: tuple[Any, ...]
) -> Shortcut | None:
    """Have the compiled core make small calls on ``communicator``; None where it cannot.

    ``of_group`` and ``of_rank`` are what ``Door.issue`` works with, in the order in which
    ``transport/native/calls/shortcut.c`` has it.
    """
    outline = communicator.outline()
    if core is None or outline is None:
        return None
    return core.Shortcut(*outline, (*of_group, *of_rank))


def resume(tensor: Any, op: ReduceOp | None, communicator: Communicator, call: Call) -> Any:
    """Go on with the all_reduce of ``tensor``, or without ``op`` the barrier, of the shortcut."""
    communicator.resume(call, None if op is None else tensor.ravel(), op)
    return None if op is None else tensor
