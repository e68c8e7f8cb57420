"""``FailureListener``: handles the entries of the job's log."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from meshlib._calls.failures.messages import end_of_server
from meshlib._calls.failures.statements import Statement
from meshlib._diagnosis.watcher import JobLogEntry
from meshlib._events.events import (
    Abort,
    Agreed,
    CanStop,
    Departures,
    Query,
    RankEnded,
    RankLost,
    Ready,
    Refused,
    StackRequest,
    StopRequest,
    Watched,
)
from meshlib._events.log import answer_key
from meshlib._job.meeting import call_off
from meshlib._job.membership import JobMembership
from meshlib._job.registry import GroupRegistry
from meshlib._job.reporting.progress import ProgressReporter
from meshlib._job.stopping import StopAgreement
from meshlib._recording.recorder import FlightRecorder
from transport._errors import DistError, DistStoreError, RankFailedError
from transport._store.base import Store


class FailureListener:
    """The listener of the rank of ``membership``, whose groups are in ``registry``.

    The watcher calls ``on_event`` and ``on_store_lost``; any thread may call the other methods.
    ``as_launched``: the ranks have the numbers that the launcher assigned.
    """

    def __init__(
        self,
        store: Store,
        membership: JobMembership,
        registry: GroupRegistry,
        recorder: FlightRecorder,
        progress: ProgressReporter,
        stopping: StopAgreement,
        main_thread: int,
        *,
        as_launched: bool,
    ) -> None:
        self.server: int | None = None
        """The rank that serves the store, if a rank does."""
        self.lost: threading.Event = threading.Event()
        """Set when a rank was lost."""
        self.left: threading.Event = threading.Event()
        """Set when all ranks that left before this one are known."""
        self._store = store
        self._rank = membership.rank
        self._membership = membership
        self._registry = registry
        self._recorder = recorder
        self._progress = progress
        self._stopping = stopping
        self._main_thread = main_thread
        self._as_launched = as_launched
        self._lock = threading.Lock()
        self._users_stores: tuple[Store, ...] = ()
        # Each listener with the ranks whose ends were reported to it.
        self._exit_listeners: tuple[tuple[Callable[[int, str], None], set[int]], ...] = ()

    # ------------------------------------------------------------------ events

    def on_event(self, event: JobLogEntry) -> None:
        """Act on one entry of the job's log."""
        match event:
            case Query():
                self._answer(event)
            case Abort():
                self._registry.fail(event.group, event.exception())
            case Refused():
                self._registry.refuse(event)
            case Departures():
                self._membership.note_departures(event)
                self._registry.do_without(event)
                self._stopping.settle()
                if self._exit_listeners:
                    self._notify_exits(dict.fromkeys(event.ranks, "has left the job"))
                if self._rank in event.ranks:
                    self.left.set()
            case RankLost(rank, how) if rank != self._rank:
                self._lose(rank, how)
            case RankEnded(rank, how) if rank != self._rank and self._as_launched:
                self._lose(rank, how)
            case Agreed(name, text):
                self._membership.note_agreed(name, text)
                if self._membership.is_left_out(name, text):
                    self._registry.end_all(f"rank {self._rank} was excluded from {name} of the job")
            case Ready(rank):
                self._membership.note_waiting(rank)
            case Watched() | StackRequest():
                self._progress.on_request(event)
            case StopRequest() | CanStop():
                self._stopping.on_event(event)
            case _:
                pass

    def on_store_lost(self, error: DistError | None) -> None:
        """Treat the rank that served the store as lost, unless it left in good order."""
        self.left.set()
        server = self.server
        if server not in (None, self._rank) and server not in self._membership.left:
            self._lose(server, end_of_server(error))
        self._stopping.on_store_lost(error)

    def _lose(self, rank: int, how: str) -> None:
        error = RankFailedError(f"rank {rank} {how}", rank)
        # Before the groups, because a group that is created meanwhile checks the membership.
        self._membership.note_lost(rank, error)
        self._registry.lose(rank, error)
        self._stopping.settle()
        with self._lock:
            stores = self._users_stores
        for store in stores:
            store.end_waits(error, self)
        self.lost.set()
        self._notify_exits({rank: how})
        with suppress(DistStoreError):
            call_off(self._store)

    def _answer(self, query: Query) -> None:
        group = self._registry.get(query.group)
        reached, ranks = (0, ()) if group is None else (group.state.order.sequence, group.ranks)
        records = self._recorder.records()
        statement = Statement.of(self._rank, records, self._main_thread, query, reached, ranks)
        with suppress(DistStoreError):
            self._store.set(answer_key(query.ticket, self._rank), statement.pack())

    # ------------------------------------------------------------------ subscribers

    def add_store(self, store: Store) -> None:
        """End waits on ``store``, the user's own, when a rank of this job is lost."""
        with self._lock:
            self._users_stores = (*self._users_stores, store)
        lost = next(iter(self._membership.lost.values()), None)
        store.end_waits(lost, self)

    def on_exit(self, callback: Callable[[int, str], None]) -> None:
        """Call ``callback(rank, how)`` for each other rank that is lost or has left.

        Ranks that are already gone are reported now, later ones from the watcher's thread. ``how``
        completes "rank 1 …".
        """
        with self._lock:
            self._exit_listeners = (*self._exit_listeners, (callback, set()))
        self._notify_exits(self.exits())

    def exits(self) -> dict[int, str]:
        """Return how each other rank that is gone has ended; the texts complete "rank 1 …"."""
        exits = dict.fromkeys(self._membership.left, "has left the job")
        for rank, error in self._membership.lost.items():
            exits.setdefault(rank, str(error).removeprefix(f"rank {rank} "))
        exits.pop(self._rank, None)
        return exits

    def _notify_exits(self, exits: Mapping[int, str]) -> None:
        for callback, known in self._exit_listeners:
            with self._lock:
                unseen = [rank for rank in exits if rank != self._rank and rank not in known]
                known.update(unseen)
            for rank in unseen:
                callback(rank, exits[rank])

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Release the user's stores at the end of the job."""
        for store in self._users_stores:
            store.end_waits(None, self)

    def end_in_a_fork(self) -> None:
        """Make this usable in a fork of the rank's process."""
        self._lock = threading.Lock()  # a thread that the fork lacks may have held it
