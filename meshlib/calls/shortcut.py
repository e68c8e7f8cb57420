"""The numbers that a group gives its collectives, and the shortcut that gives them, too."""

from __future__ import annotations

from typing import Any, Protocol

from transport.call import Call, Kind, history_after, pack_header
from transport.communicator import Communicator
from transport.native import core
from transport.reduce_op import ReduceOp

SHORT = frozenset(
    () if core is None else set(Kind) - {Kind.SEND, Kind.RECV, Kind.ALLOCATE, Kind.SPLIT}
)
"""Kinds of calls after which it is worth to look whether there is a shortcut."""


class Shortcut(Protocol):
    """Opens the usual calls of a group in compiled code, as ``ProcessGroup.issue`` would, and makes
    the small ones.

    What has to wait long, or goes wrong, goes on in ``ProcessGroup``, and raises as ever. Returns
    None for a call that is not the usual one: nothing has happened then.
    """

    checked: bool
    """Set to False to measure what recording and comparing cost. For nothing else."""

    def all_reduce(self, tensor: Any, op: ReduceOp, code: int, seconds: float, /) -> Any:
        """Reduce ``tensor`` and return it. ``code`` is that of ``op``."""
        ...

    def barrier(self, seconds: float, /) -> bool | None:
        """Return True when every member has called."""
        ...

    def issue(
        self,
        run: Any,
        seconds: float,
        nbytes: int,
        elements: int,
        root: int,
        kind: int,
        dtype: int,
        op: int,
        extra: int,
        /,
    ) -> Any:
        """Open any collective on host arrays and return what it returns.

        NotImplemented, not None, for a call that is not the usual one.
        """
        ...


class _Order:
    """``sequence`` is the number of the last collective, ``history`` what ``CallHeader`` says."""

    __slots__ = ("history", "sequence")

    def __init__(self) -> None:
        self.sequence = self.history = 0

    def next_header(
        self, elements: int, root: int, kind: int, dtype: int, op: int, extra: int, /
    ) -> bytes:
        """Number the next collective and return its header, packed (see ``CallHeader``)."""
        sequence, history = self.sequence + 1, self.history
        packed = pack_header(sequence, elements, root, kind, dtype, op, 0, history, extra)
        self.sequence, self.history = sequence, history_after(packed)
        return packed


Order: type[_Order] = _Order if core is None else core.Order


def open_shortcut(
    communicator: Communicator, of_group: tuple[Any, ...], of_world: tuple[Any, ...]
) -> Shortcut | None:
    """Have the compiled core make small calls on ``communicator``; None where it cannot.

    ``of_group`` and ``of_world`` are what ``ProcessGroup.issue`` works with, in the order in which
    ``transport/native/shortcut.c`` has it.
    """
    outline = communicator.outline()
    if core is None or outline is None:
        return None
    return core.Shortcut(*outline, (*of_group, *of_world))


def resume(tensor: Any, op: ReduceOp | None, communicator: Communicator, call: Call) -> Any:
    """Go on with the all_reduce of ``tensor``, or without ``op`` the barrier, of the shortcut."""
    communicator.resume(call, None if op is None else tensor.ravel(), op)
    return True if op is None else tensor
