"""``Posting``: a rank's samples go to the store while somebody watches the job.

Nothing is done before somebody says so in the job's log (``Watched``): no thread, no connection.
Ranks that are threads of one process share the thread that posts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from meshlib.diagnosis.attendant import Attendant
from meshlib.diagnosis.sampling.sample import SAMPLED, Sample, sample_key
from meshlib.events.events import Watched
from transport.store.base import Store

LEAST_SECONDS = 0.05
"""Nobody is asked for samples more often than this."""


class Posting:
    """Posts what ``take()`` returns for ``rank``, as often as those who watch want it."""

    def __init__(self, rank: int, store: Store, take: Callable[[], Sample]) -> None:
        self.rank = rank
        self.take = take
        self.known: bool = False
        """Whether it is in the log of those that post."""
        self._store = store
        self._wishes: dict[str, float] = {}
        self._poster: Attendant[Posting] | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def every(self) -> float:
        """Seconds from one sample to the next."""
        return max(LEAST_SECONDS, min(self._wishes.values(), default=1.0))

    def hear(self, event: Watched) -> None:
        """Begin, go on or end, as somebody who watches says."""
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
        """Post nothing any more."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        poster, self._poster = self._poster, None
        if poster is not None:
            poster.leave(self)


class _Poster(Attendant[Posting]):
    """The thread that does it."""

    name = "samples"

    def work(self, store: Store, ending: threading.Event) -> None:
        while not ending.is_set():
            users = self.users
            store.multi_set(
                [sample_key(user.rank) for user in users], [user.take().pack() for user in users]
            )
            new = [user for user in users if not user.known]
            if new:  # only now: who reads of a rank finds its sample
                store.append(SAMPLED, "".join(f"{user.rank}\n" for user in new))
                for user in new:
                    user.known = True
            ending.wait(min((user.every for user in users), default=1.0))
