"""The side of the World that a process group needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from meshlib.diagnosis.log import RankLog
from meshlib.diagnosis.recorder import FlightRecorder
from transport.call import Call, CallHeader
from transport.communicator import Communicator
from transport.errors import DistError
from transport.store.base import Store

if TYPE_CHECKING:
    from meshlib.groups.process_group import ProcessGroup

Run = Callable[[Communicator, Call], Any]
Observer = Callable[["ProcessGroup", CallHeader, str, Run], Run]


class Host(Protocol):
    """The identity of this rank, and what its groups share."""

    rank: int
    store: Store
    recorder: FlightRecorder
    log: RankLog
    observers: dict[str, Observer]
    """By the id of the group on whose behalf they look: see ``ProcessGroup.observed``."""

    def make_communicator(self, group: ProcessGroup, device: str) -> Communicator:
        """Make the communicator of ``group`` for arrays on ``device``."""
        ...

    def note_failure(self, error: DistError) -> None:
        """Keep what is known about ``error``, which broke a group, for later."""
        ...

    def make_companion(self, base: ProcessGroup, purpose: str, desc: str) -> ProcessGroup:
        """Make the group beside ``base`` for calls of ``purpose``."""
        ...
