"""``JobWatch``: keeps a ``JobView`` up to date from the store of a running job.

A line in the job's log requests samples from the ranks. The watch reads the samples, and follows
the log. Its will cancels the request, so ranks stop posting when the monitor disappears.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from meshlib._diagnosis.sampling.sample import SAMPLED, Sample, sample_key
from meshlib._events.events import StackRequest, Watched, parse
from meshlib._events.log import EVENTS, LOGS, LogReader, answer_key, publish
from meshlib._monitor.view import JobView
from transport._errors import DistError, DistStoreError, StoreTimeoutError
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore

SECONDS = 1.0
"""The seconds between two samples of a rank."""
STACK_SECONDS = 5.0
_END_SECONDS = 5.0
_STORE_SECONDS = 5.0
_LOGGER = logging.getLogger("meshlib")
T = TypeVar("T")


class JobWatch:
    """A watch on the newest job at ``store``, which updates ``view`` every ``every`` seconds.

    ``close`` ends the watch and also closes ``store``.
    """

    def __init__(self, store: Store, view: JobView, every: float = SECONDS) -> None:
        self._view = view
        self._store = store.with_grace(_STORE_SECONDS)
        self._whole = store
        self._every = every
        self._lock = threading.Lock()
        self._logs = LogReader(self._store, LOGS, bytes.decode)
        self._log: _WatchedLog | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshlib-monitor", daemon=True)

    def start(self) -> None:
        """Start a thread that calls ``look`` repeatedly."""
        self._thread.start()

    def close(self) -> None:
        """End the watch; the ranks stop posting samples."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        self._leave()
        self._whole.close()

    def read(self, use: Callable[[JobView], T]) -> T:
        """Return ``use(view)``, computed while the view does not change."""
        with self._lock:
            return use(self._view)

    def look(self) -> None:
        """Read new events and samples; raise DistStoreError if the store cannot be reached."""
        now = time.time()
        names = [name for name in self._logs.read(0.0) if name]
        if names and (self._log is None or names[-1] != self._log.name):
            self._follow(names[-1], now)
        log = self._log
        if log is None:
            return
        events, samples = log.read()
        with self._lock:
            for event in events:
                self._view.on_event(event, now)
            for sample in samples:
                self._view.take(sample, now)
            self._view.tick(now)

    def stacks(self, rank: int, timeout: float = STACK_SECONDS) -> dict[str, Any]:
        """Return the stacks of ``rank``, each as a list of lines.

        ``main`` is the user's part of the main thread's stack, ``threads`` has all stacks by thread
        name. Raises ValueError for a rank that is unknown or gone, StoreTimeoutError when it does
        not answer in ``timeout`` seconds, DistStoreError when the store cannot be reached.
        """
        log = self._log
        with self._lock:
            view = self._view.ranks.get(rank)
            ended = view.ended if view is not None else None
        if log is None or view is None:
            raise ValueError(f"there is no rank {rank}")
        if ended is not None:
            raise ValueError(f"rank {rank} is gone: it {view.how}")
        return log.stacks(rank, timeout)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self.look()
            except DistStoreError as error:
                if not self._closing.is_set():
                    with self._lock:
                        self._view.end(f"the job's store is gone: {error}", time.time())
                return
            except Exception:
                # One failed update must not end the monitor.
                _LOGGER.exception("the monitor could not read the job")
            self._closing.wait(self._every)

    def _follow(self, name: str, now: float) -> None:
        self._leave()
        log = _WatchedLog(self._whole.clone(), name, self._every)
        with self._lock:
            self._view.begin("the ranks have restarted", now)
        self._log = log

    def _leave(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()


class _WatchedLog:
    """The log ``name`` and the samples of one World; owns the client ``store``."""

    def __init__(self, store: Store, name: str, every: float) -> None:
        self.name = name
        prefix = name.removesuffix(EVENTS).removesuffix("/")
        self._client = PrefixStore(prefix, store) if prefix else store
        self._store = self._client.with_grace(_STORE_SECONDS)
        self._me = secrets.token_hex(4)
        self._events = LogReader(self._store, EVENTS, parse)
        self._sampled = LogReader(self._store, SAMPLED, bytes.decode)
        self._ranks: dict[int, None] = {}
        try:
            self._client.set_will(EVENTS, Watched(self._me, 0.0).line())
            publish(self._store, Watched(self._me, every))
        except Exception:
            store.close()
            raise

    def read(self) -> tuple[list[Any], list[Sample]]:
        """Return the new events, and each rank's last sample."""
        self._ranks.update(dict.fromkeys(map(int, self._sampled.read(0.0))))
        keys = [sample_key(rank) for rank in self._ranks]
        values = self._store.multi_get(keys) if keys else []
        return self._events.read(0.0), [Sample.unpack(value) for value in values]

    def stacks(self, rank: int, timeout: float) -> dict[str, Any]:
        """See ``JobWatch.stacks``."""
        ticket = secrets.token_hex(8)
        store = self._client.clone()  # so that the wait does not block the watch
        try:
            publish(store, StackRequest(rank, ticket))
            key = answer_key(ticket, rank)
            try:
                stacks: dict[str, Any] = json.loads(store.get(key, timeout=timeout))
            except StoreTimeoutError:
                raise StoreTimeoutError(
                    f"rank {rank} has not answered in {timeout:g} s: its process is stopped, or"
                    " in a function that does not release Python's interpreter lock"
                ) from None
            store.delete_key(key)
            return stacks
        finally:
            store.close()

    def close(self) -> None:
        """Cancel the request for samples, and close the client."""
        with suppress(DistError):
            publish(self._store, Watched(self._me, 0.0))
        self._client.close()
