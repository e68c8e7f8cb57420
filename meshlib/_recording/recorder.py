"""The flight recorder: a ring of a rank's last calls, always on.

A record stores only numbers and references, because it is made for every call. Readers format it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING

from meshlib._native import calls as native
from transport import _environment as environment
from transport._calls.call import Call, CallTail
from transport._calls.header import Kind
from transport._waiting.deadline import Deadline

if TYPE_CHECKING:
    from transport._cuda.completion import Completion

CAPACITY = 1000
_MOST_FILES = 4096
_MARKS = 64
COLLECTIVE = -1
"""The ``peer`` of a collective's record; other peers are group ranks or ``ANY_SOURCE``."""
ANY_SOURCE = -2
OWN_PACKAGES = ("meshlib", "transport", "parallel")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
OWN_FOLDERS = tuple(os.path.join(_ROOT, package, "") for package in OWN_PACKAGES)
"""This project's folders, whose frames are skipped in the search for the user's line."""
# The search also skips frames of JAX around a call in a jitted function, and frames of
# torch.distributed around its backend.
_BETWEEN = tuple(os.path.join("site-packages", library, "") for library in ("jax", "torch"))

_getframe = sys._getframe  # pyright: ignore[reportPrivateUsage]
_monotonic = time.monotonic


def is_between(filename: str) -> bool:
    """Return whether ``filename`` belongs to a library that makes calls on the user's behalf."""
    return any(folder in filename for folder in _BETWEEN)


class _OwnFiles(dict[str, bool]):
    """A cache by file name: True if frames of the file are skipped."""

    def __missing__(self, filename: str) -> bool:
        if len(self) >= _MOST_FILES:  # each cell of a notebook is a file
            self.clear()
        self[filename] = own = filename.startswith(OWN_FOLDERS) or is_between(filename)
        return own


class Record(Call):
    """The recorder's entry for a call: its line in the program, and its times (monotonic seconds).

    ``started`` is the moment at which the call left its queue, ``label`` the name from
    ``record_comm``, ``thread`` the id of the thread that issued the call.
    """

    # Small, because the memory of the oldest record, which is reused, is no longer in the caches.
    __slots__ = ()

    def __init__(
        self,
        packed: bytes,
        sync: bool,
        group: str,
        nbytes: int,
        peer: int,
        seconds: float,
        label: str | None,
        thread: int,
        code: CodeType,
        instruction: int,
    ) -> None:
        # The compiled core makes records without this constructor, with the same attributes.
        self.packed = packed
        self.sync = sync
        self.group = group
        self.nbytes = nbytes
        self.peer = peer
        self.seconds = seconds
        self.label = label
        self.thread = thread
        self.code = code
        self.instruction = instruction
        self.waiting_for: int | None = None
        self.completion: Completion | None = None
        self.rest: CallTail | None = None
        self.error = None
        self.started: float = 0.0
        self.ended: float = 0.0
        self.issued: float = _monotonic()

    @property
    def deadline(self) -> Deadline:
        """See ``Call.deadline``. Made on demand, because most small calls never wait."""
        return Deadline((self.started or self.issued) + self.seconds, self.seconds)

    def start(self) -> None:
        """Record that a queued call has started."""
        self.started = _monotonic()

    def end(self, error: str | None) -> None:
        """Record that the call has ended, with the message ``error`` if it failed."""
        self.error = error
        self.ended = _monotonic()

    @property
    def site(self) -> str:
        """The user's line that made the call: ``file:line in function``."""
        code, instruction = self.code, self.instruction
        line = next(
            (
                line
                for start, end, line in code.co_lines()
                if start <= instruction < end and line is not None
            ),
            code.co_firstlineno,
        )
        return f"{code.co_filename}:{line} in {code.co_name}"

    @property
    def kind(self) -> str:
        """The call's name: ``all_reduce``."""
        return Kind(self.header.kind).name.lower()

    @property
    def title(self) -> str:
        """The call's name in profilers: the label, else such as ``meshlib.all_reduce``."""
        return self.label or f"meshlib.{self.kind}"


def capacity_from_environment() -> int:
    """Return the number of calls that a recorder stores; raise ValueError for a wrong variable."""
    text = os.environ.get(environment.TRACE_CALLS, str(CAPACITY))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{environment.TRACE_CALLS} is {text!r}; expected a number of calls >= 1")
    return int(text)


Annotate = Callable[[str], AbstractContextManager[object]]
"""A function that opens a range with a call's name in a profiler's timeline."""


class _CallRing:
    """The last ``capacity`` calls, in records of ``type_``. The compiled core has an equal class.

    ``own_files`` selects the frames to skip; ``labels`` has the threads' current labels by thread
    id; each list in ``followers`` gets every new record.
    """

    def __init__(self, capacity: int, type_: type[Record], own_files: _OwnFiles) -> None:
        self._records: deque[Record] = deque(maxlen=capacity)
        self._type = type_
        self._own_files = own_files
        self.labels: dict[int, str] = {}
        self.followers: tuple[list[Record], ...] = ()
        self.annotate: Annotate | None = None

    def open(
        self, group: str, packed: bytes, nbytes: int, peer: int, sync: bool, seconds: float, /
    ) -> Record:
        """Record the issue of a call by the nearest caller outside of this project.

        ``packed`` is the call's header, ``seconds`` its timeout from its start on. With ``sync``,
        the issuing thread waits for its end.
        """
        # Skip this method, the call queue's and the collective's.
        frame, own = _getframe(3), self._own_files
        code = frame.f_code
        while own[code.co_filename] and (caller := frame.f_back) is not None:
            frame, code = caller, caller.f_code
        thread = get_ident()
        label = self.labels.get(thread) if self.labels else None
        # ``Record.site`` finds the line on demand.
        instruction = frame.f_lasti
        record = self._type(
            packed, sync, group, nbytes, peer, seconds, label, thread, code, instruction
        )
        self._records.append(record)
        if self.followers:
            for follower in self.followers:
                follower.append(record)
        return record

    def copy(self) -> Sequence[Record]:
        """Return the records, oldest first."""
        return self._records.copy()


class StepMarks:
    """The times at which a loop that reports its steps has ended them (monotonic seconds)."""

    def __init__(self) -> None:
        self.count: int = 0
        """The number of ended steps."""
        self.moments: deque[float] = deque(maxlen=_MARKS)

    def mark(self, now: float, count: int) -> None:
        """Record the end of the ``count``-th step at the time ``now``."""
        self.count = count
        self.moments.append(now)


Ring: type[_CallRing] = _CallRing if native is None else native.Ring


class FlightRecorder(Ring):
    """The last ``capacity`` calls of one rank, over all its groups, as records of ``type_``.

    ``annotate`` is set while a profiler runs; calls then run inside its ranges.
    """

    def __init__(self, capacity: int = CAPACITY, type_: type[Record] = Record) -> None:
        super().__init__(capacity, type_, _OwnFiles())
        self._capacity = capacity
        self.steps: StepMarks = StepMarks()
        """The ends of steps, if the program's loop reports them."""
        self.sources: list[Callable[[], list[Record]]] = []
        """Functions that return the records of calls made without the interpreter."""
        self.past: deque[Record] = deque(maxlen=capacity)
        """The records of removed sources."""

    @contextmanager
    def named(self, label: str) -> Generator[None]:
        """Give ``label`` to the records that this thread opens in the block."""
        labels, thread = self.labels, get_ident()
        before = labels.get(thread)
        labels[thread] = label
        try:
            yield
        finally:
            if before is None:
                del labels[thread]
            else:
                labels[thread] = before

    def records(self, group: str | None = None) -> list[Record]:
        """Return the records of ``group``, or of all groups, oldest first."""
        records = list(self.copy())
        if self.sources or self.past:
            records += [record for source in list(self.sources) for record in source()]
            records = sorted([*records, *self.past], key=attrgetter("issued"))[-self._capacity :]
        return [r for r in records if group is None or r.group == group]

    def follow(self) -> list[Record]:
        """Return a list that gets every new record until ``unfollow``."""
        records: list[Record] = []
        self.followers: tuple[list[Record], ...] = (*self.followers, records)
        return records

    def unfollow(self, records: list[Record]) -> None:
        """Stop adding to ``records``, a list from ``follow``."""
        self.followers = tuple(f for f in self.followers if f is not records)
