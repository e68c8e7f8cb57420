"""The watcher: a thread of each rank that follows the job's log of events.

It answers while the rank's own threads compute or block, and wakes them when a group has failed.
It sleeps in the store's server, on a connection of its own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from meshlib.failures import EVENTS, rank_exit_event
from transport.errors import DistStoreError, StoreTimeoutError
from transport.store.base import Store

_LOGGER = logging.getLogger("meshlib")
LOST = "was lost: its connection to the store broke"
BETTER_NEWS_SECONDS = 0.2

Handler = Callable[[Mapping[str, Any]], None]


class Watcher:
    """Follows the events in ``store`` and hands each to ``handler``, in order, in its thread.

    ``on_silence`` is called there when the store has gone before this rank.
    """

    def __init__(
        self, store: Store, rank: int, handler: Handler, on_silence: Callable[[], None]
    ) -> None:
        self._store = store.clone()
        self._rank = rank
        self._handler = handler
        self._on_silence = on_silence
        self._closing = False
        goodbye = {**rank_exit_event(rank, LOST), "vague": True}
        self._store.set_will(EVENTS, json.dumps(goodbye) + "\n")
        self._thread = threading.Thread(
            target=self._run, name=f"meshlib-watcher-{rank}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop following; the will is withdrawn."""
        self._closing = True
        self._store.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _run(self) -> None:
        # The store may end before this rank does; groups then work on over their links.
        with suppress(DistStoreError):
            self._follow()
        if not self._closing:
            self._on_silence()

    def _follow(self) -> None:
        offset = 0
        while not self._closing:
            news = self._news(offset, 3600.0)
            if any("vague" in event for event in _parse(news)):
                # Whoever watches that process may know more, a moment later.
                news += self._news(offset + len(news), BETTER_NEWS_SECONDS)
            offset += len(news)
            for event in sorted(_parse(news), key=lambda event: "vague" in event):
                if not self._closing:
                    self._handle(event)

    def _handle(self, event: Mapping[str, Any]) -> None:
        try:
            self._handler(event)
        except Exception:
            # Worse than one answer less is a rank that hears nothing any more.
            _LOGGER.exception("rank %d could not act on %r", self._rank, event.get("kind"))

    def _news(self, offset: int, timeout: float) -> bytes:
        try:
            return self._store.tail(EVENTS, offset, timeout=timeout)
        except StoreTimeoutError:
            return b""


def _parse(news: bytes) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in news.splitlines()]
