"""A call under way, as the communicator receives it."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING

from transport._calls.header import CallHeader
from transport._native import core
from transport._waiting.deadline import Deadline

if TYPE_CHECKING:
    from transport._cuda.completion import Completion


class _CallFields:
    """The fields of a call. The compiled core has the same ones."""

    __slots__ = (
        "code",
        "completion",
        "ended",
        "error",
        "group",
        "instruction",
        "issued",
        "label",
        "nbytes",
        "packed",
        "peer",
        "rest",
        "seconds",
        "started",
        "sync",
        "thread",
        "waiting_for",
    )

    packed: bytes
    sync: bool
    waiting_for: int | None
    completion: Completion | None
    rest: Rest | None
    error: str | None
    group: str
    nbytes: int
    peer: int
    label: str | None
    thread: int
    code: CodeType
    instruction: int
    issued: float
    started: float
    ended: float
    seconds: float


CallFields: type[_CallFields] = _CallFields if core is None else core.CallFields


class Call(CallFields):
    """A call under way on a communicator: its header, its deadline, and the awaited peer.

    ``packed`` is the packed header, the only form that is kept. Links write ``waiting_for`` before
    they block, and another thread reads it to report this rank's state. A call that goes on on a
    device after it returned has a ``completion``. If the caller may wait for the last frames later,
    ``rest`` has them. If ``sync``, the issuing thread waits for the end.
    """

    __slots__ = ("deadline",)

    def __init__(self, header: CallHeader, deadline: Deadline) -> None:
        self.packed = header.pack()
        self.deadline = deadline
        self.sync = True
        self.waiting_for: int | None = None
        self.completion: Completion | None = None
        self.rest: Rest | None = None

    @property
    def header(self) -> CallHeader:
        """The header, unpacked each time: for messages, not for the path of each call."""
        return CallHeader.unpack(self.packed)


class Rest:
    """The end of a call, which its caller waits for when the next call has begun.

    The communicator sets ``wait``, which waits for the call's last frames. ``end_before`` ends the
    call before this one. A call does so when it has posted what it can, before it waits.
    """

    __slots__ = ("_end_before", "wait")

    def __init__(self, end_before: Callable[[], object] | None = None) -> None:
        self._end_before = end_before
        self.wait: Callable[[], None] | None = None

    @property
    def overlaps(self) -> bool:
        """True if the call before has not ended."""
        return self._end_before is not None

    def end_before(self) -> None:
        """End the call before. Idempotent."""
        end_before, self._end_before = self._end_before, None
        if end_before is not None:
            end_before()
