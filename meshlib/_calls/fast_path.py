"""The numbers of a group's calls, and the fast path for common calls."""

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
    """Numbers and records the common calls of a group in compiled code, like ``CallQueue``.

    If the ranks share memory, it also makes collectives and messages of NumPy arrays. ``CallQueue``
    continues a call that fails or has to wait for a long time, and raises its errors.
    NotImplemented means that the call is not supported and nothing has been done.
    """

    checked: bool
    """Set to False only to measure the cost of recording and comparing."""
    met: bool
    """True if it accepts collectives: Python makes those before the members have met."""

    def make(self, kind: int, listed: bool, arguments: tuple[Any, ...], timeout: Timeout, /) -> Any:
        """Make the collective ``kind`` with its method's ``arguments``, without ``async_op``.

        ``listed``: the members' parts are a list of arrays, otherwise one array. Returns the
        method's result, or NotImplemented.
        """
        ...

    def open(self, what: CallSpec, seconds: float, /) -> Any:
        """Number and record a call that Python runs; return its result, or NotImplemented."""
        ...


class CallOrder:
    """The numbers of a group's calls.

    ``sequence`` is the number of the last collective, ``messages`` that of the last point-to-point
    call, ``history`` the field of ``CallHeader``. ``numbering`` is True while a thread numbers and
    queues a call; meanwhile no other call may be numbered.
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
