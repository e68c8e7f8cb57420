"""Waits for what other members write in their group's store, which any thread may break off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from transport.call import Call
from transport.errors import CommunicatorAbortedError, CommunicatorTimeoutError, DistError
from transport.runtime import Membership
from transport.store.base import Store

T = TypeVar("T")
# After so long it is worth some questions to the store to know who is missing.
PATIENCE_SECONDS = 0.2


class StoreWaits:
    """One member's waits in ``store``, each on a client of its own: hanging that up ends the wait,
    also where the server says nothing any more.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: set[Store] = set()
        self._cancelled: str | None = None

    def wait(self, wait_in: Callable[[Store], T]) -> T:
        """Return ``wait_in(client)``, which blocks on ``client`` alone.

        Raises ``CommunicatorAbortedError`` after ``cancel``, and what ``wait_in`` raises.
        """
        self.check()
        client = self._store.clone()
        try:
            with self._lock:
                self.check()
                self._waiting.add(client)
            return wait_in(client)
        except DistError:
            self.check()
            raise
        finally:
            with self._lock:
                self._waiting.discard(client)
            client.close()

    def check(self) -> None:
        """Raise ``CommunicatorAbortedError`` after ``cancel``."""
        if self._cancelled is not None:
            raise CommunicatorAbortedError(self._cancelled)

    def cancel(self, reason: str) -> None:
        """Break off all waits, now and later. Never blocks; idempotent."""
        with self._lock:
            if self._cancelled is None:
                self._cancelled = reason
            waiting = list(self._waiting)
        for client in waiting:
            client.hang_up()


def has_not_entered(
    call: Call, membership: Membership, peer: int | None
) -> CommunicatorTimeoutError:
    """Return the error for a call whose deadline passed before ``peer`` came to the group.

    ``peer`` None: it is not known which member.
    """
    name = "the last member" if peer is None else membership.describe(peer)
    return CommunicatorTimeoutError(
        f"{call.header}: {name} has not entered the group {membership.group!r} within"
        f" {call.deadline.seconds:g} s",
        peer,
    )
