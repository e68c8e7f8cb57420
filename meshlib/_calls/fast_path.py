"""The numbers that a group gives its collectives, and the fast path that gives them, too."""

from __future__ import annotations

from typing import Any, Protocol

from meshlib._calls.spec import CallSpec
from meshlib._native import calls as native
from meshlib._recording.recorder import COLLECTIVE
from transport._calls.header import ONE_SIDED, Kind, history_after, pack_header
from transport._waiting.deadline import Timeout

SHORT = frozenset(
    ()
    if native is None
    else {*Kind} - ONE_SIDED - {Kind.SEND, Kind.RECV, Kind.ALLOCATE, Kind.SPLIT, Kind.WINDOW}
)
"""Kinds of calls after which the members have met, and the fast path may make collectives."""


class FastPath(Protocol):
    """Numbers and records the usual calls of a group in compiled code, as ``CallQueue`` would.
    Where the ranks share memory it makes collectives and messages of NumPy arrays, too.

    ``CallQueue`` continues a call that has to wait long or fails, and raises its errors.
    NotImplemented means an unusual call, of which nothing has been done.
    """

    checked: bool
    """Set to False only to measure the cost of recording and comparing."""
    met: bool
    """True if it takes collectives: those before the members have met are left to Python."""

    def make(self, kind: int, listed: bool, arguments: tuple[Any, ...], timeout: Timeout, /) -> Any:
        """Make the collective ``kind`` of what its method is called with, without ``async_op``.

        ``listed``: a part for each member is an array in a list, else the parts are one array.
        Return the method's result, or NotImplemented.
        """
        ...

    def open(self, what: CallSpec, seconds: float, /) -> Any:
        """Let Python make the call; return its result, or NotImplemented."""
        ...


class CallOrder:
    """``sequence`` is the number of the last collective, ``messages`` that of the last call with
    one peer. ``history`` is that of ``CallHeader``. While a thread numbers and queues a call,
    ``numbering`` is True, and no other call may come in between.
    """

    __slots__ = ("history", "messages", "numbering", "sequence")

    def __init__(self) -> None:
        self.sequence: int = 0
        self.messages: int = 0
        self.history: int = 0
        self.numbering: bool = False

    def next_header(self, spec: CallSpec, /) -> bytes:
        """Number the call ``spec`` and return its header, packed (see ``CallHeader``)."""
        collective = spec.peer == COLLECTIVE
        sequence = (self.sequence if collective else self.messages) + 1
        history = self.history if collective else 0
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
        if collective:
            self.sequence, self.history = sequence, history_after(packed)
        else:
            self.messages = sequence
        return packed


Order: type[CallOrder] = CallOrder if native is None else native.Order
