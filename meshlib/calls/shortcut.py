"""The numbers that a group gives its collectives, and the shortcut that gives them, too."""

from __future__ import annotations

from typing import Any, Protocol

from meshlib.calls.spec import CallSpec, InPlace
from meshlib.recording.recorder import COLLECTIVE
from transport.call import Kind, history_after, pack_header
from transport.native import core

SHORT = frozenset(
    () if core is None else set(Kind) - {Kind.SEND, Kind.RECV, Kind.ALLOCATE, Kind.SPLIT}
)
"""Kinds of calls after which the members have met, and the shortcut may make collectives."""


class Shortcut(Protocol):
    """Opens the usual calls of a group in compiled code, as ``Door.issue`` would, and makes those
    itself that are small and for which the ranks share memory.

    What has to wait long, or goes wrong, goes on in ``Door``, and raises as ever. NotImplemented is
    for a call that is not the usual one: nothing has happened then.
    """

    checked: bool
    """Set to False to measure what recording and comparing cost. For nothing else."""
    met: bool
    """Whether it takes collectives: those before the members have met are left to Python."""

    def issue(self, what: CallSpec | InPlace, seconds: float, /) -> Any:
        """Make the call and return what it returns, or NotImplemented."""
        ...


class CallOrder:
    """``sequence`` is the number of the last collective, ``messages`` that of the last call with
    one peer, ``history`` what ``CallHeader`` says.
    """

    __slots__ = ("history", "messages", "sequence")

    def __init__(self) -> None:
        self.sequence: int = 0
        self.messages: int = 0
        self.history: int = 0

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


Order: type[CallOrder] = CallOrder if core is None else core.Order
