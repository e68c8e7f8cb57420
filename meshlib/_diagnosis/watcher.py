"""The watcher: follows the job's log of events in a thread that sleeps in the store.

It answers while the rank's own threads compute or block, and wakes them when a group has failed.
Ranks that are threads of one process share the thread, which reads each event once for all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from meshlib._diagnosis.shared_thread import END_SECONDS, SharedThread
from meshlib._events.events import Departures, JobEvent, Leave, RankLost, parse
from meshlib._events.log import EVENTS, LogReader
from transport import _environment as environment
from transport._errors import DistError
from transport._store.base import Store

_LOGGER = logging.getLogger("meshlib")
LOST = "was lost: its connection to the store broke"
EXPLANATION_SECONDS = 0.2
"""How long a lost rank is not reported, so that its launcher can publish how it ended."""
FROM_LAUNCHER_SECONDS = 0.8
"""The same where one launcher started all ranks and serves their store.

That launcher lives as long as the store answers. It publishes how a rank ended; on a busy machine,
a moment after the rank's connection breaks.
"""
# Ranks leave together: waking up for each of them would take as many wakeups as ranks.
LEAVING_SECONDS = 0.01

JobLogEntry = JobEvent | Departures


class Listener(Protocol):
    """Receives the events of a watcher."""

    def on_event(self, event: JobLogEntry) -> None:
        """Act on one entry of the job's log."""
        ...

    def on_store_lost(self, error: DistError | None) -> None:
        """Act on the loss of the store; ``error`` is the symptom."""
        ...


class Watcher:
    """Hands each event of the job's log in ``store`` to ``listener``, in order, one at a time.

    Earlier events may come in the constructing thread. Ranks that leave together come as one
    ``Departures``.
    """

    def __init__(self, store: Store, rank: int, listener: Listener) -> None:
        self._rank = rank
        self.listener = listener
        self._closing = False
        self._seen = 0
        # Held while an event is handled; an RLock, because that may end in ``close``.
        self._turn = threading.RLock()
        self._reader = _EventReader.of(store)
        self._reader.enter(self, store)

    def close(self) -> None:
        """Stop following, and withdraw the will. Afterwards no event is handled."""
        self._closing = True
        self._reader.leave(self)
        if self._turn.acquire(timeout=END_SECONDS):
            self._turn.release()

    @property
    def will(self) -> str:
        """The line that the store's server writes if this rank is gone without ``close``."""
        return RankLost(self._rank, LOST, vague=True).line()

    def take(self, events: Sequence[JobLogEntry]) -> None:
        """Handle the new ones of ``events``, which are all since the beginning."""
        with self._turn:
            while self._seen < len(events) and not self._closing:
                self._seen += 1
                self._handle(events[self._seen - 1])

    def _handle(self, event: JobLogEntry) -> None:
        try:
            self.listener.on_event(event)
        except Exception:
            # A rank that misses one event is better than one that misses all later ones.
            _LOGGER.exception("rank %d could not act on %r", self._rank, event)


class _EventReader(SharedThread[Watcher]):
    """Reads the log for all watchers."""

    name = "watcher"
    prepares = True

    def __init__(self) -> None:
        super().__init__()
        self._events: list[JobLogEntry] = []
        self._offset = 0

    def enter(self, user: Watcher, store: Store) -> None:
        super().enter(user, store)
        user.take(self._events)

    def work(self, store: Store, ending: threading.Event) -> None:
        log = LogReader(store, EVENTS, parse, self._offset)
        while not ending.is_set():
            read = log.read(3600.0)
            until = time.monotonic() + _explanation_seconds()
            while _unexplained(read) and (left := until - time.monotonic()) > 0:
                read += log.read(left)
            events = _together(sorted(read, key=_is_vague))
            with self._lock:
                if ending.is_set():
                    return
                self._offset = log.offset
                self._events += events
            for watcher in self.users:
                watcher.take(self._events)
            if any(isinstance(event, Departures) for event in events):
                ending.wait(LEAVING_SECONDS)

    def on_store_lost(self, error: DistError | None) -> None:
        for watcher in self.users:
            watcher.listener.on_store_lost(error)

    def _prepare(self, store: Store, user: Watcher) -> None:
        store.set_will(EVENTS, user.will)


def _explanation_seconds() -> float:
    """Return how long to wait for the launcher's report of how a process ended."""
    if environment.AGENT_STORE not in os.environ:
        return 0.0  # another launcher reports nothing, and may end this rank
    alone = os.environ.get(environment.GROUP_WORLD_SIZE, "1") == "1"
    return FROM_LAUNCHER_SECONDS if alone else EXPLANATION_SECONDS


def _unexplained(events: Sequence[JobEvent]) -> bool:
    """True if a rank is lost and no event has the reason."""
    lost = [event for event in events if isinstance(event, RankLost)]
    return bool({e.rank for e in lost if e.vague} - {e.rank for e in lost if not e.vague})


def _is_vague(event: JobEvent) -> bool:
    return isinstance(event, RankLost) and event.vague


def _together(events: Sequence[JobEvent]) -> list[JobLogEntry]:
    """Return ``events`` with successive departures as one."""
    found: list[JobLogEntry] = []
    for _, run in groupby(events, lambda event: isinstance(event, Leave)):
        alike = list(run)
        leaves = [event for event in alike if isinstance(event, Leave)]
        found += [Departures(leaves)] if leaves else alike
    return found
