"""``StopAgreement``: all ranks stop at the same step, soon after one rank requests it.

Any rank may request a stop by an event in the job's log. Each rank's watcher answers immediately
with the earliest step at which its rank can stop, also while the rank computes or waits in a call.
All ranks stop at the latest of these steps. Without a request, steps send no messages.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from meshlib._events.events import CanStop, StopRequest
from meshlib._events.log import publish
from meshlib._job.membership import JobMembership
from transport._errors import DistBackendError, DistError, DistStoreError
from transport._store.base import Store
from transport._waiting.interrupts import Condition

_LOGGER = logging.getLogger("meshlib")


class StopAgreement:
    """The agreement on the rank of ``membership``, which waits up to ``timeout`` seconds.

    The watcher calls ``on_event``, ``settle`` and ``on_store_lost``.
    """

    def __init__(self, store: Store, membership: JobMembership, timeout: float) -> None:
        self._store = store
        self._membership = membership
        self._timeout = timeout
        self._changed = Condition()
        self._why: str | None = None
        self._has_requested = False
        self._request: StopRequest | None = None
        self._earliest = 0
        self._answers: dict[int, int] = {}
        self._stop_at: int | None = None
        self._store_error: DistError | None = None

    def request(self, why: str) -> None:
        """Make the next ``should_stop`` of this rank request a stop of all ranks. Takes no lock."""
        self._why = self._why or why

    def should_stop(self, step: int) -> bool:
        """See ``meshlib.should_stop``."""
        with self._changed:
            requests = self._request is None and self._why is not None and not self._has_requested
            if self._request is None:
                self._earliest = step if self._why is not None else step + 1
                if self._why is None:
                    return False
            self._has_requested = self._has_requested or requests
        if requests:
            publish(self._store, StopRequest(self._membership.rank, self._why or ""))
        with self._changed:
            # The other ranks' watchers answer immediately, independent of their steps.
            self._changed.wait_for(self._is_over, self._timeout)
            if self._stop_at is None:
                raise self._failure(step)
            return step >= self._stop_at

    def _is_over(self) -> bool:
        return self._stop_at is not None or self._store_error is not None

    def _failure(self, step: int) -> DistError:
        if self._store_error is not None:
            return DistStoreError(
                f"should_stop({step}) on rank {self._membership.rank}: the job's store was lost"
                f" before the ranks had agreed on a step: {self._store_error}"
            )
        return DistBackendError(
            f"should_stop({step}) on rank {self._membership.rank}: no answer from ranks"
            f" {self._missing()} within {self._timeout:g} s; expected one from every rank"
        )

    def _missing(self) -> list[int]:
        gone = self._membership.lost.keys() | self._membership.left
        return [r for r in self._membership.epoch.members if r not in gone | self._answers.keys()]

    # ------------------------------------------------------------------ events

    def on_event(self, event: StopRequest | CanStop) -> None:
        """Act on an entry of the job's log."""
        if isinstance(event, CanStop):
            with self._changed:
                self._answers.setdefault(event.rank, event.step)
            self.settle()
            return
        with self._changed:
            if self._request is not None:
                return
            self._request = event
            mine = self._earliest
        with suppress(DistStoreError):  # on_store_lost follows
            publish(self._store, CanStop(self._membership.rank, mine))

    def settle(self) -> None:
        """Determine the step if all ranks that are still in the job have answered."""
        with self._changed:
            if self._request is None or self._stop_at is not None or self._missing():
                return
            self._stop_at = max(self._answers.values(), default=0)
            self._changed.notify_all()
        _LOGGER.info(
            "rank %d has requested a stop (%s): all ranks stop at step %d",
            self._request.rank,
            self._request.why,
            self._stop_at,
        )

    def on_store_lost(self, error: DistError | None) -> None:
        """End the wait for answers, which can no longer arrive."""
        with self._changed:
            self._store_error = error or DistStoreError("it was closed")
            self._changed.notify_all()

    def end_in_a_fork(self) -> None:
        """Make this usable in a fork of the rank's process."""
        self._changed = Condition()
