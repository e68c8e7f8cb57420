"""``Seen``: what this rank shows those who watch the job, when they ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshlib.calls.failures.statements import put_stacks
from meshlib.events.events import StackAsked, Watched
from meshlib.groups.process_group import ProcessGroup
from meshlib.job.membership import JobMembership
from meshlib.recording.recorder import FlightRecorder
from transport.errors import DistStoreError
from transport.store.base import Store

if TYPE_CHECKING:
    from meshlib.diagnosis.sampling.posting import Posting
    from meshlib.diagnosis.sampling.sample import Coordinate
    from meshlib.diagnosis.sampling.sampler import Standpoint


class Seen:
    """Of the rank of ``membership``, whose own thread has the number ``main_thread``."""

    def __init__(
        self,
        store: Store,
        recorder: FlightRecorder,
        membership: JobMembership,
        groups: Callable[[], Sequence[ProcessGroup]],
        main_thread: int,
    ) -> None:
        self.coordinates: tuple[Coordinate, ...] = ()
        """Where the rank is on the largest mesh."""
        self._store = store
        self._membership = membership
        self._groups = groups
        self._main_thread = main_thread
        self._recorder = recorder
        self._posting: Posting | None = None
        self._closed = False
        self._lock = threading.Lock()

    def hear(self, wish: Watched | StackAsked) -> None:
        """Do what somebody wants who watches."""
        if isinstance(wish, Watched):
            with self._lock:
                if not self._closed:
                    self._sampling().hear(wish)
        elif wish.rank == self._membership.rank:
            with suppress(DistStoreError):
                put_stacks(self._store, wish.rank, self._main_thread, wish.ticket)

    def standpoint(self) -> Standpoint:
        """Return where the rank is now."""
        from meshlib.diagnosis.sampling.sampler import Standpoint

        groups = {group.id: group.members for group in self._groups()}
        epoch, place = self._membership.epoch, self._membership.place
        return Standpoint(groups, epoch.number, place, epoch.size, self.coordinates)

    def close(self) -> None:
        """Show nothing any more."""
        with self._lock:
            self._closed = True
            if self._posting is not None:
                self._posting.close()

    def _sampling(self) -> Posting:
        if self._posting is None:
            # Most jobs are never watched.
            from meshlib.diagnosis.sampling.posting import Posting
            from meshlib.diagnosis.sampling.sampler import Sampler

            rank = self._membership.rank
            sampler = Sampler(rank, self._recorder, self._main_thread, self.standpoint)
            self._posting = Posting(rank, self._store, sampler.take)
        return self._posting
