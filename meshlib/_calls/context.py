"""``RankContext``: the parts of a rank that its groups use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshlib._calls.members import Members
from meshlib._calls.spec import Run
from meshlib._recording.log import RankLog
from meshlib._recording.recorder import FlightRecorder
from transport._calls.header import CallHeader
from transport._communicators.base import Communicator
from transport._errors import DistError
from transport._store.base import Store

Observer = Callable[[Members, CallHeader, str, Run], Run]
"""See ``meshlib.extend.observe``."""


class RankContext(Protocol):
    """The state that all groups of one rank share; implemented by ``World``."""

    rank: int
    store: Store
    recorder: FlightRecorder
    log: RankLog
    observers: dict[str, Observer]
    """By the id of the group that they work for."""

    def make_communicator(self, members: Members, device: str, /) -> Communicator:
        """Make the communicator of ``members`` for arrays on ``device``."""
        ...

    def adopt_thread(self) -> None:
        """Assign the calling thread to this rank's World."""
        ...

    def note_failure(self, error: DistError, /) -> None:
        """Store the error that broke a group."""
        ...
