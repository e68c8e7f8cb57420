"""``Hearing``: what one rank hears of the others in the job's log, and whom it tells."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from meshlib.calls.failures.messages import end_of_server
from meshlib.calls.failures.statements import Statement
from meshlib.diagnosis.watcher import News
from meshlib.events.events import (
    Abort,
    Agreed,
    Departures,
    Query,
    RankEnded,
    RankLost,
    Ready,
    Refused,
    StackAsked,
    Watched,
)
from meshlib.events.log import answer_key
from meshlib.groups.process_group import ProcessGroup
from meshlib.job.membership import JobMembership
from meshlib.job.registry import GroupRegistry
from meshlib.job.seen import Seen
from meshlib.job.thread_rank import ALL_HERE, LOST
from meshlib.recording.recorder import FlightRecorder
from transport.errors import DistBackendError, DistError, DistStoreError, RankFailedError
from transport.store.base import Store


class Hearing:
    """Of the rank of ``membership``, whose groups are in ``registry``; ``hear`` and
    ``hear_silence`` are the watcher's, other methods any thread's.

    ``as_launched``: the ranks have the numbers that the launcher gave them.
    """

    def __init__(
        self,
        store: Store,
        membership: JobMembership,
        registry: GroupRegistry,
        recorder: FlightRecorder,
        seen: Seen,
        main_thread: int,
        *,
        as_launched: bool,
    ) -> None:
        self.server: int | None = None
        """The rank that serves the store, if one does."""
        self.bad_news: threading.Event = threading.Event()
        """A rank was lost."""
        self.gone: threading.Event = threading.Event()
        """All who left before this rank are known."""
        self._store = store
        self._rank = membership.rank
        self._membership = membership
        self._registry = registry
        self._recorder = recorder
        self._seen = seen
        self._main_thread = main_thread
        self._as_launched = as_launched
        self._lock = threading.Lock()
        self._failures: dict[str, DistError] = {}
        self._refusals: dict[str, list[Refused]] = {}
        self._users_stores: tuple[Store, ...] = ()
        # Who is told of the ends of ranks, and of whose so far.
        self._mourners: tuple[tuple[Callable[[int, str], None], set[int]], ...] = ()

    # ------------------------------------------------------------------ heard

    def hear(self, event: News) -> None:
        """Act on one entry of the job's log."""
        match event:
            case Query():
                self._answer(event)
            case Abort():
                self._break(event)
            case Refused():
                self._note_refusal(event)
            case Departures():
                self._membership.note_departures(event)
                for group in self._registry.all():
                    group.do_without(event)
                if self._mourners:
                    self._tell_of_ends(dict.fromkeys(event.ranks, "has left the job"))
                if self._rank in event.ranks:
                    self.gone.set()
            case RankLost(rank, how) if rank != self._rank:
                self._lose(rank, how)
            case RankEnded(rank, how) if rank != self._rank and self._as_launched:
                self._lose(rank, how)
            case Agreed(name, text):
                self._membership.note_agreed(name, text)
                if self._membership.is_left_out(name, text):
                    self._end_calls(f"rank {self._rank} was left out of {name} of the job")
            case Ready(rank):
                self._membership.note_waiting(rank)
            case Watched() | StackAsked():
                self._seen.hear(event)
            case _:
                pass

    def hear_silence(self, error: DistError | None) -> None:
        """The store is gone: so is the rank that served it, unless it has left in good order."""
        self.gone.set()
        server = self.server
        if server not in (None, self._rank) and server not in self._membership.left:
            self._lose(server, end_of_server(error))

    def _break(self, abort: Abort) -> None:
        error = abort.exception()
        with self._lock:
            self._failures.setdefault(abort.group, error)
        group = self._registry.get(abort.group)
        if group is not None:
            group.fail(error)

    def _note_refusal(self, refusal: Refused) -> None:
        with self._lock:
            self._refusals.setdefault(refusal.group, []).append(refusal)
        group = self._registry.get(refusal.group)
        if group is not None:
            group.door.failure.hear_refusal(refusal)

    def _lose(self, rank: int, how: str) -> None:
        error = RankFailedError(f"rank {rank} {how}", rank)
        # A group that is made from now on is told by ``tell_group``.
        self._membership.note_lost(rank, error)
        with self._lock:
            broken = [group for group in self._registry.all() if rank in group.ranks]
            stores = self._users_stores
        for group in broken:
            group.fail(error)
        for store in stores:
            store.end_waits(error, self)
        self.bad_news.set()
        self._tell_of_ends({rank: how})
        # Who still waits for all to come waits in vain.
        with suppress(DistStoreError):
            self._store.compare_set(ALL_HERE, "", LOST)

    def _end_calls(self, why: str) -> None:
        for group in self._registry.all():
            group.fail(DistBackendError(f"{group} has ended: {why}"))

    def _answer(self, query: Query) -> None:
        group = self._registry.get(query.group)
        reached = group.reached() if group is not None else 0
        records = self._recorder.records()
        said = Statement.of(self._rank, records, self._main_thread, query, reached)
        with suppress(DistStoreError):
            self._store.set(answer_key(query.ticket, self._rank), said.pack())

    # ------------------------------------------------------------------ told

    def tell_group(self, group: ProcessGroup) -> None:
        """Tell a new group what is known already."""
        with self._lock:
            known = self._failures.get(group.id) or self._membership.failure_of(group.ranks)
            refusals = list(self._refusals.get(group.id, ()))
        if known is not None:
            group.fail(known)
        for refusal in refusals:
            group.door.failure.hear_refusal(refusal)
        for departures in self._membership.departures:
            group.do_without(departures)

    def tell_store(self, store: Store) -> None:
        """Have waits on ``store``, an object of the user's, end when a rank of this job is lost."""
        with self._lock:
            self._users_stores = (*self._users_stores, store)
        lost = next(iter(self._membership.lost.values()), None)
        store.end_waits(lost, self)

    def on_end(self, told: Callable[[int, str], None]) -> None:
        """Have ``told(rank, how)`` called for each other rank that is gone, lost or in good order:
        at once for those that are known to be, later from the watcher's thread.

        ``how`` completes "rank 1 …".
        """
        with self._lock:
            self._mourners = (*self._mourners, (told, set()))
        self._tell_of_ends(self.ends())

    def ends(self) -> dict[int, str]:
        """Return how the other ranks ended that are known to be gone: "rank 1 …"."""
        ends = dict.fromkeys(self._membership.left, "has left the job")
        for rank, error in self._membership.lost.items():
            ends.setdefault(rank, str(error).removeprefix(f"rank {rank} "))
        ends.pop(self._rank, None)
        return ends

    def _tell_of_ends(self, ends: Mapping[int, str]) -> None:
        for told, known in self._mourners:
            with self._lock:
                news = [rank for rank in ends if rank != self._rank and rank not in known]
                known.update(news)
            for rank in news:
                told(rank, ends[rank])

    # ------------------------------------------------------------------ ended

    def close(self) -> None:
        """Let go of the user's stores: the job has ended here."""
        for store in self._users_stores:
            store.end_waits(None, self)

    def end_in_a_fork(self) -> None:
        """Be usable in a fork of this rank's process."""
        self._lock = threading.Lock()  # a thread that is not here may have held it
