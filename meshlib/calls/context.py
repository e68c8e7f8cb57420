"""``RankContext``: what the groups of one rank share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshlib.calls.members import Members
from meshlib.calls.spec import Run
from meshlib.recording.log import RankLog
from meshlib.recording.recorder import FlightRecorder
from transport.call import CallHeader
from transport.communicators.base import Communicator
from transport.errors import DistError
from transport.store.base import Store

Observer = Callable[[Members, CallHeader, str, Run], Run]
"""See ``ProcessGroup.observed``."""


@dataclass(slots=True, eq=False)
class RankContext:
    """The identity of this rank, and what its groups share; a World makes it.

    ``make_communicator(members, device)`` makes the communicator for arrays on ``device``,
    ``adopt_thread()`` has the calling thread find this rank's World, ``note_failure(error)`` keeps
    what broke a group for later.
    """

    rank: int
    store: Store
    recorder: FlightRecorder
    log: RankLog
    make_communicator: Callable[[Members, str], Communicator]
    adopt_thread: Callable[[], None]
    note_failure: Callable[[DistError], None]
    observers: dict[str, Observer] = field(default_factory=dict[str, Observer])
    """By the id of the group on whose behalf they look."""
