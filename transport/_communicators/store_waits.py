"""Waits for other members' keys in the group's store, which any thread may cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    StoreTimeoutError,
)
from transport._store.base import Store

T = TypeVar("T")
# After this time, a second request identifies the missing member.
_FIRST_WAIT_SECONDS = 0.2


class PeerKeys:
    """Waits for other members' keys in the group's store, within the deadline of a call.

    Past the call's deadline, a wait raises ``CommunicatorTimeoutError``, which names a missing
    member. After ``cancel`` it raises ``CommunicatorAbortedError``. During the wait,
    ``call.waiting_for`` is a missing member. Several threads may wait, each with its own ``aside``
    of the store. ``cancel`` disconnects these, so the waits end even if the server hangs.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._store = membership.store
        self._lock = threading.Lock()
        self._waiting: set[Store] = set()
        self._cancelled: str | None = None

    def read(self, key: str, peer: int, call: Call) -> bytes:
        """Return the value that ``peer`` writes under ``key``."""
        return self.read_all(lambda _peer: key, [peer], call)[peer]

    def read_all(
        self, key_of: Callable[[int], str], peers: Sequence[int], call: Call
    ) -> dict[int, bytes]:
        """Return the values that ``peers`` write under their keys, by peer, in one request."""
        self.check()
        if not peers:
            return {}
        keys = [key_of(peer) for peer in peers]

        def missing(error: StoreTimeoutError) -> int:
            return next(
                (p for p, key in zip(peers, keys, strict=True) if _lacks(error, key)), peers[0]
            )

        def wait(client: Store) -> list[bytes]:
            try:
                first_wait = min(_FIRST_WAIT_SECONDS, call.deadline.remaining())
                return client.multi_get(keys, first_wait)
            except StoreTimeoutError as error:
                call.waiting_for = missing(error)
                return client.multi_get(keys, call.deadline.remaining())

        try:
            found = self.wait(wait)
        except StoreTimeoutError as error:
            raise has_not_entered(call, self._membership, missing(error)) from error
        call.waiting_for = None
        return dict(zip(peers, found, strict=True))

    def wait(self, wait_in: Callable[[Store], T]) -> T:
        """Return ``wait_in(client)``, which must block only on ``client``.

        Raises ``CommunicatorAbortedError`` after ``cancel``, and the errors of ``wait_in``.
        """
        self.check()
        client = self._store.aside()
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
        """End all present and later waits. Never blocks; idempotent."""
        with self._lock:
            if self._cancelled is None:
                self._cancelled = reason
            waiting = list(self._waiting)
        for client in waiting:
            client.hang_up()


def _lacks(error: StoreTimeoutError, key: str) -> bool:
    """True if ``error`` names ``key``, with or without a prefix, among the missing keys."""
    return any(name == key or name.endswith(f"/{key}") for name in error.missing)


def has_not_entered(call: Call, membership: Membership, peer: int) -> CommunicatorTimeoutError:
    """Return the error for a call whose deadline passed before ``peer`` entered the group."""
    return CommunicatorTimeoutError(
        f"{call.header}: {membership.describe(peer)} has not entered the group"
        f" {membership.group!r} within {call.deadline.seconds:g} s",
        peer,
    )
