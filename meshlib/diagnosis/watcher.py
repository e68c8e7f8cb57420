"""The watcher: a rank's ear for the job's log of events, in a thread that sleeps in the store.

It answers while the rank's own threads compute or block, and wakes them when a group has failed.
Ranks that are threads of one process share the thread: each event is read once for all of them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from meshlib.diagnosis.attendant import END_SECONDS, Attendant
from meshlib.events.events import Departures, Event, Leave, RankLost, parse
from meshlib.events.log import EVENTS, LogReader
from transport import environment
from transport.errors import DistError
from transport.store.base import Store

_LOGGER = logging.getLogger("meshlib")
LOST = "was lost: its connection to the store broke"
BETTER_NEWS_SECONDS = 0.2
FROM_LAUNCHER_SECONDS = 0.8
"""Where one launcher has started all ranks and serves their store: it lives as long as that
answers, and will say how a rank ended; on a busy machine, a moment after its connection breaks.
"""
# Ranks leave together: who woke up for each of them would do so as often as there are ranks.
LEAVING_SECONDS = 0.01

News = Event | Departures
Handler = Callable[[News], None]
OnSilence = Callable[[DistError | None], None]


class Watcher:
    """Hands each event of the job's log in ``store`` to ``handler``, in order, one at a time.

    What was in the log before may come in the thread that makes this. ``on_silence`` is called
    when the store has gone before this rank, with the error that told. Ranks that are read to leave
    together come as one ``Departures``.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        handler: Handler,
        on_silence: OnSilence,
    ) -> None:
        self._rank = rank
        self._handler = handler
        self.on_silence = on_silence
        self._closing = False
        self._seen = 0
        # Held while an event is handled; an RLock, because that may end in ``close``.
        self._turn = threading.RLock()
        self._reader = _Reader.of(store)
        self._reader.enter(self, store)

    def close(self) -> None:
        """Stop following; the will is withdrawn. No event is handled any more afterwards."""
        self._closing = True
        self._reader.leave(self)
        if self._turn.acquire(timeout=END_SECONDS):
            self._turn.release()

    @property
    def will(self) -> str:
        """What the store's server writes into the log if this rank is gone without ``close``."""
        return RankLost(self._rank, LOST, vague=True).line()

    def take(self, events: Sequence[News]) -> None:
        """Handle those of ``events``, all that there were, which this rank has not seen yet."""
        with self._turn:
            while self._seen < len(events) and not self._closing:
                self._seen += 1
                self._handle(events[self._seen - 1])

    def _handle(self, event: News) -> None:
        try:
            self._handler(event)
        except Exception:
            # Worse than one answer less is a rank that hears nothing any more.
            _LOGGER.exception("rank %d could not act on %r", self._rank, event)


class _Reader(Attendant[Watcher]):
    """Reads the log, and has the watchers take what comes."""

    name = "watcher"
    prepares = True

    def __init__(self) -> None:
        super().__init__()
        self._events: list[News] = []
        self._offset = 0

    def enter(self, user: Watcher, store: Store) -> None:
        super().enter(user, store)
        user.take(self._events)

    def work(self, store: Store, ending: threading.Event) -> None:
        log = LogReader(store, EVENTS, parse, self._offset)
        while not ending.is_set():
            read = log.read(3600.0)
            until = time.monotonic() + _patience()
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

    def bereave(self, error: DistError | None) -> None:
        for watcher in self.users:
            watcher.on_silence(error)

    def _prepare(self, store: Store, user: Watcher) -> None:
        store.set_will(EVENTS, user.will)


def _patience() -> float:
    """Return how long whoever watches a process is given to say how it ended."""
    if environment.AGENT_STORE not in os.environ:
        return 0.0  # no launcher of ours: nobody will say more, and the launcher may end this rank
    alone = os.environ.get(environment.GROUP_WORLD_SIZE, "1") == "1"
    return FROM_LAUNCHER_SECONDS if alone else BETTER_NEWS_SECONDS


def _unexplained(events: Sequence[Event]) -> bool:
    """Whether a rank is lost of which nobody has said how."""
    lost = [event for event in events if isinstance(event, RankLost)]
    return bool({e.rank for e in lost if e.vague} - {e.rank for e in lost if not e.vague})


def _is_vague(event: Event) -> bool:
    return isinstance(event, RankLost) and event.vague


def _together(events: Sequence[Event]) -> list[News]:
    """Return ``events`` with successive departures as one."""
    found: list[News] = []
    for _, run in groupby(events, lambda event: isinstance(event, Leave)):
        alike = list(run)
        leaves = [event for event in alike if isinstance(event, Leave)]
        found += [Departures(leaves)] if leaves else alike
    return found
