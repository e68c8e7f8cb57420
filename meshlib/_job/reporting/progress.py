"""``ProgressReporter``: answers monitors of the job on this rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from meshlib._calls.failures.statements import put_stacks
from meshlib._events.events import StackRequest, Watched
from meshlib._job.membership import JobMembership
from meshlib._job.registry import GroupRegistry
from meshlib._recording.recorder import FlightRecorder
from transport._errors import DistStoreError
from transport._store.base import Store

if TYPE_CHECKING:
    from meshlib._diagnosis.sampling.posting import Posting
    from meshlib._diagnosis.sampling.sample import Coordinate
    from meshlib._diagnosis.sampling.sampler import RankStatus


class ProgressReporter:
    """Reports the calls of the rank of ``membership``, whose main thread is ``main_thread``."""

    def __init__(
        self,
        store: Store,
        recorder: FlightRecorder,
        membership: JobMembership,
        registry: GroupRegistry,
        main_thread: int,
    ) -> None:
        self.coordinates: Sequence[Coordinate] = ()
        """The rank's place on the largest mesh."""
        self._store = store
        self._membership = membership
        self._registry = registry
        self._main_thread = main_thread
        self._recorder = recorder
        self._posting: Posting | None = None
        self._closed = False
        self._lock = threading.Lock()

    def on_request(self, request: Watched | StackRequest) -> None:
        """Answer a monitor's request."""
        if isinstance(request, Watched):
            with self._lock:
                if not self._closed:
                    self._sampling().on_event(request)
        elif request.rank == self._membership.rank:
            with suppress(DistStoreError):
                put_stacks(self._store, request.rank, self._main_thread, request.ticket)

    def status(self) -> RankStatus:
        """Return the rank's groups, and its place in the job and on a mesh."""
        from meshlib._diagnosis.sampling.sampler import RankStatus

        groups = {queue.members.id: queue.members for queue in self._registry.queues()}
        membership, epoch = self._membership, self._membership.epoch
        return RankStatus(
            membership.rank, groups, epoch.number, membership.place, epoch.size, self.coordinates
        )

    def close(self) -> None:
        """Stop reporting."""
        with self._lock:
            self._closed = True
            if self._posting is not None:
                self._posting.close()

    def _sampling(self) -> Posting:
        if self._posting is None:
            # Most jobs are never watched.
            from meshlib._diagnosis.sampling.posting import Posting
            from meshlib._diagnosis.sampling.sampler import Sampler

            sampler = Sampler(self._recorder, self._main_thread, self)
            self._posting = Posting(self._membership.rank, self._store, sampler)
        return self._posting
