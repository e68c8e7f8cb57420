"""``Posting``: sends a rank's samples to the store while a monitor watches the job.

A thread and a connection exist only after a monitor has published ``Watched`` in the job's log.
Ranks that are threads of one process share the posting thread.
"""

from __future__ import annotations

import threading

from meshlib._diagnosis.sampling.sample import SAMPLED, sample_key
from meshlib._diagnosis.sampling.sampler import Sampler
from meshlib._diagnosis.shared_thread import SharedThread
from meshlib._events.events import Watched
from transport._store.base import Store

LEAST_SECONDS = 0.05
"""The shortest time between two samples of a rank."""


class Posting:
    """The posting of samples of ``rank``, at the rate of the fastest monitor."""

    def __init__(self, rank: int, store: Store, sampler: Sampler) -> None:
        self.rank = rank
        self.sampler = sampler
        self.known: bool = False
        """True if the rank is in the log ``SAMPLED``."""
        self._store = store
        self._intervals: dict[str, float] = {}
        self._poster: SharedThread[Posting] | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def every(self) -> float:
        """Seconds from one sample to the next."""
        return max(LEAST_SECONDS, min(self._intervals.values(), default=1.0))

    def on_event(self, event: Watched) -> None:
        """Start, continue or stop posting, as a monitor requests."""
        with self._lock:
            if self._closed:
                return
            if event.every > 0:
                self._intervals[event.by] = event.every
            else:
                self._intervals.pop(event.by, None)
            if self._intervals and self._poster is None:
                poster = self._poster = _Poster.of(self._store)
                poster.enter(self, self._store)
            elif not self._intervals:
                self._end()

    def close(self) -> None:
        """Stop posting."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        poster, self._poster = self._poster, None
        if poster is not None:
            poster.leave(self)


class _Poster(SharedThread[Posting]):
    """The thread that posts the samples of all ranks of a process."""

    name = "samples"

    def work(self, store: Store, ending: threading.Event) -> None:
        while not ending.is_set():
            users = self.users
            samples = [user.sampler.take().pack() for user in users]
            store.multi_set([sample_key(user.rank) for user in users], samples)
            new = [user for user in users if not user.known]
            if new:  # last: a monitor that reads a rank's line must find its sample
                store.append(SAMPLED, "".join(f"{user.rank}\n" for user in new))
                for user in new:
                    user.known = True
            ending.wait(min((user.every for user in users), default=1.0))
