"""Where the members of a group are, as they say in the group's store."""

from __future__ import annotations

import threading

from transport.call import Call
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistError,
    StoreTimeoutError,
)
from transport.runtime import Membership
from transport.shm.locality import Place
from transport.store.base import Store


class Directory:
    """Says where this rank is, and finds out where others are. Several threads; any may ``cancel``.

    All waits raise ``CommunicatorTimeoutError`` past the call's deadline, and
    ``CommunicatorAbortedError`` after ``cancel``.
    """

    def __init__(self, membership: Membership, place: Place) -> None:
        self.place = place
        self._membership = membership
        self._places: dict[int, Place] = {membership.rank: place}
        self._lock = threading.Lock()
        self._waiting: set[Store] = set()
        self._cancelled: str | None = None

    def publish(self) -> None:
        """Tell the other members where this rank is."""
        self._membership.store.set(_place_key(self._membership.rank), self.place.encode())

    def look_up(self, peer: int, call: Call) -> Place:
        """Return where ``peer`` is, waiting until it has said so."""
        place = self._places.get(peer)
        if place is None:
            place = Place.decode(self.read(_place_key(peer), peer, call))
            self._places[peer] = place
        return place

    def find(self, peer: int) -> Place | None:
        """Return where ``peer`` is, None if it has not said so yet."""
        if peer not in self._places:
            store, key = self._membership.store, _place_key(peer)
            if not store.check([key]):
                return None
            self._places[peer] = Place.decode(store.get(key))
        return self._places[peer]

    def is_known(self, peer: int) -> bool:
        """Whether ``peer`` has said where it is."""
        return self.find(peer) is not None

    def is_near(self, peer: int, call: Call) -> bool:
        """Whether memory can be shared with ``peer``, as far as can be told; see ``look_up``."""
        return peer == self._membership.rank or self.place.may_share_with(self.look_up(peer, call))

    def read(self, key: str, peer: int, call: Call) -> bytes:
        """Return what ``peer`` writes under ``key`` in the group's store, waiting for it."""
        store = self._membership.store
        self.check()
        if store.check([key]):
            return store.get(key)
        call.waiting_for = peer
        # On a client of its own, whose wait can be broken off.
        waiter = store.clone()
        try:
            with self._lock:
                self.check()
                self._waiting.add(waiter)
            value = waiter.get(key, call.deadline.remaining())
        except StoreTimeoutError as error:
            raise CommunicatorTimeoutError(
                f"{call.header}: {self._membership.describe(peer)} has not entered the group"
                f" {self._membership.group!r} within {call.deadline.seconds:g} s",
                peer,
            ) from error
        except DistError:
            self.check()
            raise
        finally:
            with self._lock:
                self._waiting.discard(waiter)
            waiter.close()
        call.waiting_for = None
        return value

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
        for store in waiting:
            store.close()


def _place_key(rank: int) -> str:
    return f"shm/{rank}"
