"""The watcher: a thread that follows the job's log of events, and sleeps in the store.

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
"""The delay before a lost rank is reported, in which its launcher can publish how it ended."""
FROM_LAUNCHER_SECONDS = 0.8
"""The delay if one launcher started all ranks and serves their store.

As long as the store answers, that launcher is alive and will publish how the rank ended. On a busy
machine this takes a moment after the rank's connection breaks.
"""
# Ranks leave together, and the thread must not wake up for each of them.
LEAVING_SECONDS = 0.01

JobLogEntry = JobEvent | Departures


class Listener(Protocol):
    """The receiver of a watcher's events."""

    def on_event(self, event: JobLogEntry) -> None:
        """Handle one entry of the job's log."""
        ...

    def on_store_lost(self, error: DistError | None) -> None:
        """Handle the loss of the store; ``error`` is the symptom."""
        ...


class Watcher:
    """A follower of the job's log in ``store``: passes each event to ``listener``, in order.

    The constructing thread may pass earlier events. Ranks that leave together are one
    ``Departures``.
    """

    def __init__(self, store: Store, rank: int, listener: Listener) -> None:
        self._rank = rank
        self.listener = listener
        self._closing = False
        self._seen = 0
        # Held while an event is handled. An RLock, because the handler may call ``close``.
        self._turn = threading.RLock()
        self._reader = _EventReader.of(store)
        self._reader.enter(self, store)

    def close(self) -> None:
        """Stop following, and withdraw the will. No event is handled afterwards."""
        self._closing = True
        self._reader.leave(self)
        if self._turn.acquire(timeout=END_SECONDS):
            self._turn.release()

    @property
    def will(self) -> str:
        """The line that the store's server writes if this rank disappears without ``close``."""
        return RankLost(self._rank, LOST, vague=True).line()

    def take(self, events: Sequence[JobLogEntry]) -> None:
        """Handle the new events in ``events``, the list of all events since the beginning."""
        with self._turn:
            while self._seen < len(events) and not self._closing:
                self._seen += 1
                self._handle(events[self._seen - 1])

    def _handle(self, event: JobLogEntry) -> None:
        try:
            self.listener.on_event(event)
        except Exception:
            # Missing one event is better than missing all later ones.
            _LOGGER.exception("rank %d could not handle %r", self._rank, event)


class _EventReader(SharedThread[Watcher]):
    """The thread that reads the log for all watchers of a process."""

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
    """Return the seconds to wait for the launcher's report of how a process ended."""
    if environment.AGENT_STORE not in os.environ:
        return 0.0  # a foreign launcher reports nothing, and may end this rank
    alone = os.environ.get(environment.GROUP_WORLD_SIZE, "1") == "1"
    return FROM_LAUNCHER_SECONDS if alone else EXPLANATION_SECONDS


def _unexplained(events: Sequence[JobEvent]) -> bool:
    """Return whether a rank is lost and no event has the reason."""
    lost = [event for event in events if isinstance(event, RankLost)]
    return bool({e.rank for e in lost if e.vague} - {e.rank for e in lost if not e.vague})


def _is_vague(event: JobEvent) -> bool:
    return isinstance(event, RankLost) and event.vague


def _together(events: Sequence[JobEvent]) -> list[JobLogEntry]:
    """Return ``events`` with successive departures merged into one."""
    found: list[JobLogEntry] = []
    for _, run in groupby(events, lambda event: isinstance(event, Leave)):
        alike = list(run)
        leaves = [event for event in alike if isinstance(event, Leave)]
        found += [Departures(leaves)] if leaves else alike
    return found
