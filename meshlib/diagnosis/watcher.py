"""The watcher: a rank's ear for the job's log of events, in a thread that sleeps in the store.

It answers while the rank's own threads compute or block, and wakes them when a group has failed.
Ranks that are threads of one process share the thread: each event is read once for all of them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshlib.diagnosis.attendant import END_SECONDS, Attendant
from meshlib.diagnosis.failures import EVENTS, rank_exit_event
from transport.errors import StoreTimeoutError
from transport.store.base import Store

_LOGGER = logging.getLogger("meshlib")
LOST = "was lost: its connection to the store broke"
BETTER_NEWS_SECONDS = 0.2
# Ranks leave together: who woke up for each of them would do so as often as there are ranks.
LEAVING_SECONDS = 0.01

Event = Mapping[str, Any]
Handler = Callable[[Event], None]


class Watcher:
    """Hands each event of the job's log in ``store`` to ``handler``, in order, one at a time.

    What was in the log before may come in the thread that makes this. ``on_silence`` is called
    when the store has gone before this rank. Departures that are read together come as one event:
    see ``_together``.
    """

    def __init__(
        self, store: Store, rank: int, handler: Handler, on_silence: Callable[[], None]
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
        return json.dumps({**rank_exit_event(self._rank, LOST), "vague": True}) + "\n"

    def take(self, events: Sequence[Event]) -> None:
        """Handle those of ``events``, all that there were, which this rank has not seen yet."""
        with self._turn:
            while self._seen < len(events) and not self._closing:
                self._seen += 1
                self._handle(events[self._seen - 1])

    def _handle(self, event: Event) -> None:
        try:
            self._handler(event)
        except Exception:
            # Worse than one answer less is a rank that hears nothing any more.
            _LOGGER.exception("rank %d could not act on %r", self._rank, event.get("kind"))


class _Reader(Attendant[Watcher]):
    """Reads the log, and has the watchers take what comes."""

    name = "watcher"

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._offset = 0

    def enter(self, user: Watcher, store: Store) -> None:
        super().enter(user, store)
        user.take(self._events)

    def work(self, store: Store, ending: threading.Event) -> None:
        while not ending.is_set():
            news = _read(store, self._offset, 3600.0)
            if any("vague" in event for event in _parse(news)):
                # Whoever watches that process may know more, a moment later.
                news += _read(store, self._offset + len(news), BETTER_NEWS_SECONDS)
            events = _together(sorted(_parse(news), key=lambda event: "vague" in event))
            with self._lock:
                if ending.is_set():
                    return
                self._offset += len(news)
                self._events += events
            for watcher in self.users:
                watcher.take(self._events)
            if any(event["kind"] == "left" for event in events):
                ending.wait(LEAVING_SECONDS)

    def bereave(self) -> None:
        for watcher in self.users:
            watcher.on_silence()

    def _prepare(self, store: Store, user: Watcher) -> None:
        store.set_will(EVENTS, user.will)


def _read(store: Store, offset: int, timeout: float) -> bytes:
    try:
        return store.tail(EVENTS, offset, timeout=timeout)
    except StoreTimeoutError:
        return b""


def _parse(news: bytes) -> list[Event]:
    return [json.loads(line) for line in news.splitlines()]


def _together(events: Sequence[Event]) -> list[Event]:
    """Return ``events`` with successive departures as one: ``left`` has, by rank, the groups that
    it had made calls on.
    """
    found: list[Event] = []
    for event in events:
        if event["kind"] != "leave":
            found.append(event)
            continue
        if not found or found[-1]["kind"] != "left":
            found.append({"kind": "left", "left": {}})
        found[-1]["left"][event["rank"]] = event["joined"]
    return found
