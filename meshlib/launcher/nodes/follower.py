"""Reading the agents' log, in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from meshlib.launcher.nodes.records import LOG, Gone, Record, parse
from transport.errors import DistError, StoreTimeoutError
from transport.store.base import Store

_CLOSE_SECONDS = 2.0


class Follower:
    """Reads the log from its beginning to the leaving of ``agent`` and hands on each record, in a
    thread of its own.
    """

    def __init__(
        self,
        store: Store,
        agent: str,
        hear: Callable[[Record], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._store = store
        self._agent = agent
        self._hear = hear
        self._give_up = give_up
        self._thread = threading.Thread(target=self._run, name="meshrun-follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop reading, once the agent has said that it leaves."""
        self._thread.join(_CLOSE_SECONDS)
        self._store.close()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            self._read()
        except DistError:
            pass  # the talker's connection tells when the store is gone; this is only the end
        except Exception as error:  # noqa: BLE001 (an agent that hears nothing would wait forever)
            self._give_up(f"the agents' log cannot be read: {error!r}")

    def _read(self) -> None:
        offset = 0
        while True:
            with contextlib.suppress(StoreTimeoutError):
                news = self._store.tail(LOG, offset, timeout=3600.0)
                offset += len(news)
                for record in map(parse, news.splitlines()):
                    if isinstance(record, Gone) and record.agent == self._agent and not record.lost:
                        return
                    self._hear(record)
