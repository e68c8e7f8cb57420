"""The state of a running call, as the communicator receives it."""

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
    """The fields of a call; the compiled core defines the same fields."""

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
    rest: CallTail | None
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
    """A running call on a communicator: its header, its deadline, and the awaited peer.

    Only the packed header is stored, in ``packed``. Links write ``waiting_for`` before they block;
    another thread reads it to report this rank's state. A call that continues on a device after it
    returned has a ``completion``. If the caller may wait for the last frames later, ``rest`` holds
    them. If ``sync`` is true, the issuing thread waits for the call's end.
    """

    __slots__ = ("deadline",)

    def __init__(self, header: CallHeader, deadline: Deadline) -> None:
        self.packed = header.pack()
        self.deadline = deadline
        self.sync = True
        self.waiting_for: int | None = None
        self.completion: Completion | None = None
        self.rest: CallTail | None = None

    @property
    def header(self) -> CallHeader:
        """The header. Unpacked at each access, so only for messages."""
        return CallHeader.unpack(self.packed)


class CallTail:
    """The last frames of a call, which its caller awaits only after the next call has begun.

    The communicator sets ``wait``, which waits for these frames. ``end_before`` ends the previous
    call. A call invokes it after posting all frames that it can, before its first wait.
    """

    __slots__ = ("_end_before", "wait")

    def __init__(self, end_before: Callable[[], object] | None = None) -> None:
        self._end_before = end_before
        self.wait: Callable[[], None] | None = None

    @property
    def overlaps(self) -> bool:
        """True if the previous call has not ended."""
        return self._end_before is not None

    def end_before(self) -> None:
        """End the previous call. Idempotent."""
        end_before, self._end_before = self._end_before, None
        if end_before is not None:
            end_before()
