"""The flight recorder: a ring of a rank's last calls, always on.

Opening a record costs about a microsecond: it keeps numbers and references, and leaves
formatting to the moment somebody asks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any

from transport.call import Call, CallFields, Kind
from transport.deadline import Deadline

CAPACITY = 1000
_MOST_FILES = 4096
COLLECTIVE = -1
"""The ``peer`` of a record that is a collective's; others are group ranks or ``ANY_SOURCE``."""
ANY_SOURCE = -2
OWN_PACKAGES = ("meshlib", "transport", "parallel")
_ROOT = os.path.dirname(os.path.dirname(__file__))
OWN_FOLDERS = tuple(os.path.join(_ROOT, package, "") for package in OWN_PACKAGES)
"""Where this project's code is; its frames are skipped when looking for the user's line."""
# So are those of JAX, between a jitted function's caller and a call inside of it.
_JAX = os.path.join("site-packages", "jax", "")

_getframe = sys._getframe  # pyright: ignore[reportPrivateUsage]
_monotonic = time.monotonic


class _OwnFiles(dict[str, bool]):
    """Whether a file's frames are skipped, by its name; found out once for each."""

    def __missing__(self, filename: str) -> bool:
        if len(self) >= _MOST_FILES:  # a notebook's every cell is one
            self.clear()
        self[filename] = own = filename.startswith(OWN_FOLDERS) or _JAX in filename
        return own


class _Naming(threading.local):
    """What each thread calls its calls at the moment, and its number."""

    def __init__(self) -> None:
        self.now: tuple[str | None, int] = (None, threading.get_ident())


class Record(Call):
    """A call as the recorder keeps it: where it was made, and how far it got (monotonic seconds).

    ``started`` is the moment of its turn.
    """

    # Small, because the memory of the oldest record has left the caches when the newest gets it.
    __slots__ = ()

    if TYPE_CHECKING:

        def __init__(
            self,
            packed: bytes,
            sync: bool,
            group: str,
            nbytes: int,
            peer: int,
            seconds: float,
            named: tuple[str | None, int],
            code: CodeType,
            instruction: int,
        ) -> None: ...

    else:
        __init__ = CallFields.__init__  # not Call's: there is no header, only what is packed

    @property
    def label(self) -> str | None:
        """The name that ``record_comm`` gave."""
        return self.named[0]

    @property
    def thread(self) -> int:
        """The number of the thread that issued the call."""
        return self.named[1]

    @property
    def deadline(self) -> Deadline:
        """See ``Call.deadline``. Made when asked for: most small calls never wait."""
        return Deadline((self.started or self.issued) + self.seconds, self.seconds)

    def start(self) -> None:
        """Note that the turn has come of a call that had to wait for it."""
        self.started = _monotonic()

    def end(self, error: str | None) -> None:
        """Note that the call is over, with ``error`` or well."""
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
        """What profilers call it: the name that ``record_comm`` gave, or ``meshlib.all_reduce``."""
        return self.label or f"meshlib.{self.kind}"

    @property
    def state(self) -> str:
        """``queued``, ``running``, ``done`` or ``failed``."""
        if self.ended:
            return "failed" if self.error else "done"
        return "running" if self.started else "queued"

    def as_json(self) -> dict[str, Any]:
        """Return the record for reports and dumps."""
        header = self.header
        return {
            "group": self.group,
            "sequence": header.sequence,
            "call": str(header),
            "kind": header.kind,
            "header": list(header),
            "bytes": self.nbytes,
            "peer": self.peer,
            "site": self.site,
            "name": self.label,
            "state": self.state,
            "issued": self.issued,
            "started": self.started,
            "ended": self.ended,
            "error": self.error,
            "waiting_for": None if self.ended else self.waiting_for,
        }


Annotate = Callable[[str], AbstractContextManager[object]]
"""Makes a range, named for a call, in some profiler's timeline."""


class FlightRecorder:
    """The last ``capacity`` calls of one rank, over all its groups.

    ``annotate`` is None, or set while somebody profiles: calls then run inside such ranges.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Record] = deque(maxlen=capacity)
        self._own = _OwnFiles()
        self._naming = _Naming()
        self._followers: tuple[list[Record], ...] = ()
        self.annotate: Annotate | None = None

    def open(
        self, group: str, packed: bytes, nbytes: int, peer: int, sync: bool, seconds: float
    ) -> Record:
        """Record that a call was issued, by the nearest caller outside of this project.

        ``packed`` is its header, ``seconds`` what it may take from its turn on. ``sync``: the
        issuing thread waits for its end.
        """
        # Below the third are this, the door and the collective's method.
        frame, own = _getframe(3), self._own
        code = frame.f_code
        while own[code.co_filename] and (caller := frame.f_back) is not None:
            frame, code = caller, caller.f_code
        # The line is looked up when somebody asks for it.
        record = Record(
            packed, sync, group, nbytes, peer, seconds, self._naming.now, code, frame.f_lasti
        )
        self._ring.append(record)
        if self._followers:
            for follower in self._followers:
                follower.append(record)
        return record

    def parts(self) -> tuple[Any, ...]:
        """Return what the compiled core needs to ``open`` records itself."""
        return self, Record, self._ring, self._own, self._naming

    @contextmanager
    def named(self, label: str) -> Generator[None]:
        """Give ``label`` to the records that this thread opens in the block."""
        before = self._naming.now
        self._naming.now = (label, before[1])
        try:
            yield
        finally:
            self._naming.now = before

    def records(self, group: str | None = None) -> list[Record]:
        """Return the records, oldest first; of one group or of all."""
        return [r for r in self._ring.copy() if group is None or r.group == group]

    def follow(self) -> list[Record]:
        """Return a list that gets every record from now on, until ``unfollow``."""
        records: list[Record] = []
        self._followers = (*self._followers, records)
        return records

    def unfollow(self, records: list[Record]) -> None:
        """End what ``follow`` began."""
        self._followers = tuple(f for f in self._followers if f is not records)
