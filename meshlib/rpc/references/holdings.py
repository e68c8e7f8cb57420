"""What a worker tells about references, and what it is told: grants and releases on their way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from meshlib.calls.work import Future
from meshlib.rpc.errors import RRefLostError
from meshlib.rpc.references.ownership import ObjectId, Owned, Ownership
from meshlib.rpc.wire.payload import Payload, Pickling
from transport.errors import DistBackendError


class Ways(Protocol):
    """How a worker reaches another one."""

    def tell(self, rank: int, notice: object) -> None:
        """Tell a worker something, after all that it was told before."""
        ...


class _Pickled(threading.local):
    """What the calling thread is pickling: for whom, and the references that it passes."""

    def __init__(self) -> None:
        self.to: int | None = None
        self.passed = list[tuple[int, ObjectId]]()


class Holdings:
    """The references of worker ``rank``, and its objects. Any thread.

    ``make(oid)`` makes the future of an object's value; ``wake()`` has ``release_dropped`` called
    soon, in another thread.
    """

    def __init__(
        self, rank: int, make: Callable[[ObjectId], Future[Any]], wake: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.ways: Ways | None = None
        self._wake = wake
        self._lock = threading.RLock()
        self._objects = Ownership(make)
        self._here = _Pickled()
        self._pickling = Pickling()
        self._dropped: deque[tuple[int, ObjectId, int]] = deque()

    # ------------------------------------------------------------------ as a holder

    def dump(self, value: object, to: int | None) -> Payload:
        """Return ``value`` as it travels to worker ``to``; references in it are granted first.

        None: to nobody in particular, and there must be none.
        """
        here = self._here
        before, passed = (here.to, here.passed), list[tuple[int, ObjectId]]()
        here.to, here.passed = to, passed
        try:
            payload = self._pickling.dump(value)
        finally:
            here.to, here.passed = before
        for owner, oid in passed:
            self._tell(owner, ("grant", tuple(oid), to))
        return payload

    @property
    def pickled_for(self) -> int | None:
        """The rank of the worker for which the calling thread pickles; None: it does not."""
        return self._here.to

    def pass_on(self, owner: int, oid: ObjectId) -> int:
        """Note that a reference is being pickled; return the rank that gives it.

        Raises RuntimeError outside of calls.
        """
        here = self._here
        if here.to is None:
            raise RuntimeError(
                "an RRef can only be pickled as part of a remote call's arguments or result:"
                " its owner has to know who holds it"
            )
        here.passed.append((owner, oid))
        return self.rank

    def drop(self, owner: int, oid: ObjectId, giver: int) -> None:
        """Note that a reference is gone. Takes no lock: for ``__del__``."""
        self._dropped.append((owner, oid, giver))
        if len(self._dropped) == 1:
            self._wake()

    def give_up(self, owner: int, oid: ObjectId, why: str) -> None:
        """Tell the owner that an object will not be made: the request was lost, or is too late."""
        self._tell(owner, ("void", tuple(oid), why))

    def release_dropped(self) -> None:
        """Tell the owners of the references that are gone."""
        by_owner: dict[int, list[tuple[ObjectId, int]]] = {}
        while self._dropped:
            owner, oid, giver = self._dropped.popleft()
            by_owner.setdefault(owner, []).append((oid, giver))
        for owner, released in by_owner.items():
            self._tell(owner, ("release", [(tuple(oid), giver) for oid, giver in released]))

    def _tell(self, owner: int, notice: object) -> None:
        if owner == self.rank:
            self.hear(self.rank, notice)
        elif self.ways is not None:
            self.ways.tell(owner, notice)

    # ------------------------------------------------------------------ as an owner

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)

    def create(self, oid: ObjectId) -> Owned:
        """Note that an object is to be made here; its creator holds the first reference."""
        with self._lock:
            return self._objects.create(oid)

    def value_of(self, oid: ObjectId) -> Future[Any]:
        """Return the future of an object's value. Raises ``RRefLostError``."""
        with self._lock:
            return self._objects.find(oid).value

    def hear(self, rank: int, notice: Any) -> None:
        """Act on what a worker tells about references to objects of this one."""
        freed: list[object] = []  # their finalizers run without the lock
        match notice:
            case ("grant", oid, to):
                with self._lock:
                    freed.append(self._objects.grant(ObjectId(*oid), rank, to))
            case ("release", released):
                with self._lock:
                    for oid, giver in released:
                        freed.append(self._objects.release(ObjectId(*oid), giver, rank))
            case ("void", oid, why):
                with self._lock:
                    found = self._objects.void(ObjectId(*oid))
                if found is not None:
                    _fail(found, why)
            case _:
                raise DistBackendError(f"expected news of references, got {notice!r}")

    def bury(self, rank: int, how: str, who: str) -> None:
        """Drop what ``rank``, which messages call ``who``, held: it is dead."""
        with self._lock:
            orphans = self._objects.bury(rank, how)
        for orphan in orphans:
            _fail(orphan, f"the object was never made: {who}, which asked for it, {how}")


def _fail(owned: Owned, why: str) -> None:
    with suppress(RuntimeError):  # it was made all the same
        owned.value.set_exception(RRefLostError(why))
