"""The flight recorder: a ring of a rank's last calls, always on.

Opening a record costs well under a microsecond: it keeps numbers and references, and leaves
formatting to the moment somebody asks.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

from transport.call import Call, CallHeader, Kind

CAPACITY = 1000
COLLECTIVE = -1
"""The ``peer`` of a record that is a collective's; others are group ranks or ``ANY_SOURCE``."""
ANY_SOURCE = -2
OWN_PACKAGES = ("meshlib", "transport", "parallel")
_ROOT = os.path.dirname(os.path.dirname(__file__))
OWN_FOLDERS = tuple(os.path.join(_ROOT, package, "") for package in OWN_PACKAGES)
"""Where this project's code is; its frames are skipped when looking for the user's line."""
# So are those of JAX, between a jitted function's caller and a call inside of it.
_JAX = os.path.join("site-packages", "jax", "")

_monotonic = time.monotonic
_get_ident = threading.get_ident


@functools.lru_cache(maxsize=4096)
def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(OWN_FOLDERS) or _JAX in code.co_filename


class Record:
    """One call: what it was, where it was made, and how far it got (monotonic seconds)."""

    # Defaults live in the class: a record is made for every call, and most stay as they are.
    call: Call | None = None
    error: str | None = None
    label: str | None = None
    started = 0.0
    ended = 0.0

    def __init__(self, group: str, header: CallHeader, nbytes: int, peer: int, sync: bool) -> None:
        self.group = group
        self.header = header
        self.nbytes = nbytes
        self.peer = peer
        self.sync = sync
        self.thread = _get_ident()
        self.issued = _monotonic()
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        while _is_own(frame.f_code) and frame.f_back is not None:
            frame = frame.f_back
        # The line is looked up when somebody asks for it.
        self.code: CodeType = frame.f_code
        self.instruction: int = frame.f_lasti

    def start(self, call: Call) -> None:
        """Note that the call's turn has come."""
        self.call = call
        self.started = _monotonic()

    def end(self, error: str | None) -> None:
        """Note that the call is over, with ``error`` or well."""
        self.error = error
        self.ended = _monotonic()

    @property
    def site(self) -> str:
        """The user's line that made the call: ``file:line in function``."""
        line = next(
            (
                line
                for start, end, line in self.code.co_lines()
                if start <= self.instruction < end and line is not None
            ),
            self.code.co_firstlineno,
        )
        return f"{self.code.co_filename}:{line} in {self.code.co_name}"

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
        call = self.call
        return {
            "group": self.group,
            "sequence": self.header.sequence,
            "call": str(self.header),
            "kind": self.header.kind,
            "header": list(self.header),
            "bytes": self.nbytes,
            "peer": self.peer,
            "site": self.site,
            "name": self.label,
            "state": self.state,
            "issued": self.issued,
            "started": self.started,
            "ended": self.ended,
            "error": self.error,
            "waiting_for": call.waiting_for if call is not None and not self.ended else None,
        }


Annotate = Callable[[str], AbstractContextManager[object]]
"""Makes a range, named for a call, in some profiler's timeline."""


class _Naming(threading.local):
    """What each thread calls its calls at the moment."""

    label: str | None = None


class FlightRecorder:
    """The last ``capacity`` calls of one rank, over all its groups.

    ``annotate`` is None, or set while somebody profiles: calls then run inside such ranges.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Record] = deque(maxlen=capacity)
        self._naming = _Naming()
        self._followers: tuple[list[Record], ...] = ()
        self.annotate: Annotate | None = None

    def open(
        self, group: str, header: CallHeader, nbytes: int, peer: int = COLLECTIVE, sync: bool = True
    ) -> Record:
        """Record that a call was issued, by the nearest caller outside of this project.

        ``sync``: the issuing thread waits for its end.
        """
        record = Record(group, header, nbytes, peer, sync)
        record.label = self._naming.label
        self._ring.append(record)
        for follower in self._followers:
            follower.append(record)
        return record

    @contextmanager
    def named(self, label: str) -> Generator[None]:
        """Give ``label`` to the records that this thread opens in the block."""
        before = self._naming.label
        self._naming.label = label
        try:
            yield
        finally:
            self._naming.label = before

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
