"""``Posting``: a rank's samples go to the store while a monitor watches the job.

Before a monitor says so in the job's log (``Watched``), there is no thread and no connection.
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
    """Posts the samples of ``rank``, at the pace of the fastest monitor."""

    def __init__(self, rank: int, store: Store, sampler: Sampler) -> None:
        self.rank = rank
        self.sampler = sampler
        self.known: bool = False
        """True if the rank is in the log of those that post."""
        self._store = store
        self._wishes: dict[str, float] = {}
        self._poster: SharedThread[Posting] | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def every(self) -> float:
        """Seconds from one sample to the next."""
        return max(LEAST_SECONDS, min(self._wishes.values(), default=1.0))

    def on_event(self, event: Watched) -> None:
        """Start, continue or stop posting, as a monitor requests."""
        with self._lock:
            if self._closed:
                return
            if event.every > 0:
                self._wishes[event.by] = event.every
            else:
                self._wishes.pop(event.by, None)
            if self._wishes and self._poster is None:
                poster = self._poster = _Poster.of(self._store)
                poster.enter(self, self._store)
            elif not self._wishes:
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
    """The thread that posts."""

    name = "samples"

    def work(self, store: Store, ending: threading.Event) -> None:
        while not ending.is_set():
            users = self.users
            samples = [user.sampler.take().pack() for user in users]
            store.multi_set([sample_key(user.rank) for user in users], samples)
            new = [user for user in users if not user.known]
            if new:  # only now: a monitor that reads of a rank finds its sample
                store.append(SAMPLED, "".join(f"{user.rank}\n" for user in new))
                for user in new:
                    user.known = True
            ending.wait(min((user.every for user in users), default=1.0))
