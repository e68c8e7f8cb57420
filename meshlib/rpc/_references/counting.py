"""Distributed reference counting by grants, which determines the lifetime of a worker's objects.

An object lives while any worker holds a reference to it. For each pair of workers, the object's
owner counts the unreleased references that the first worker gave to the second. A worker that
passes a reference on sends the owner a *grant*, before any later message such as the release of its
own reference. Only messages from one worker to the owner need to arrive in order. So the grant and
the release of one reference may arrive in any order, and a count may be temporarily negative. But
while a reference exists, or is in flight, some count is not zero: its own, or that of the
reference from which it was copied. No message waits for an answer.
(``tests/meshlib/rpc/test_counting.py`` has a model of this, with workers that die.)

If a granted reference is lost with its connection, the intended receiver releases it
(``LostRequests``).

A dead worker's references are dropped. Its grants to others are uncertain: a grant may have been
lost with the worker, or the grant may have arrived but not the reference. So the owner queries
all live workers for their references from the dead one, and the object lives until they have
answered. They answer when nothing more can arrive from the dead worker, and the answer replaces the
count. A worker that dies before it has answered may have passed on references from the first dead
worker, so the owner queries the live ones about the second too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from meshlib._calls.future import Future
from meshlib.rpc._errors import RRefLostError

_REMEMBERED = 1 << 16


ObjectId = tuple[int, int]
"""The rank of an object's creator, and the creator's number for it."""


class OwnedObject:
    """An object of this worker. ``value`` is done when the function that creates it has ended."""

    def __init__(self, value: Future[Any]) -> None:
        self.value = value
        self.created = False
        """True if its creator's request has arrived."""
        self.counts: Counter[tuple[int, int]] = Counter()
        """The number of references, by giver and holder."""
        self.queried: set[int] = set()
        """The dead workers about which the live ones are queried."""
        self.awaited: set[tuple[int, int]] = set()
        """The missing answers, as pairs of a dead worker and an answering worker."""


class ReferenceCounts:
    """The objects of one worker, among ``size`` workers. Not thread-safe: the caller holds a lock.

    ``make(oid)`` creates the future of an object's value.
    """

    def __init__(self, make: Callable[[ObjectId], Future[Any]], size: int) -> None:
        self.questions: list[tuple[int, int, ObjectId]] = []
        """The queries to send: the queried worker, the dead giver, the object."""
        self._make = make
        self._size = size
        self._objects: dict[ObjectId, OwnedObject] = {}
        self._freed: OrderedDict[ObjectId, None] = OrderedDict()
        self._dead: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def find(self, oid: ObjectId) -> OwnedObject:
        """Return an object, which may not have been created yet.

        Raises ``RRefLostError`` if the object was freed, or its creator is dead.
        """
        found = self._expect(oid)
        if found is not None:
            return found
        if oid in self._freed:
            raise RRefLostError(f"the object {oid} was freed: it had no references")
        raise RRefLostError(
            f"the object {oid} was never created: its creator, rank {oid[0]}, {self._dead[oid[0]]}"
        )

    def create(self, oid: ObjectId) -> OwnedObject:
        """Record the arrival of the creator's request; the creator holds the first reference. Does
        nothing for an object that the creator has abandoned (``void``).
        """
        # None: the object was freed or its creator is dead, and no worker will refer to it.
        found = self._expect(oid) or OwnedObject(self._make(oid))
        if not found.created:
            found.created = True
            if oid in self._objects:
                self._change(oid, oid[0], oid[0], 1)
        return found

    def void(self, oid: ObjectId) -> OwnedObject | None:
        """Record that the creator has abandoned an object; return it if it is still needed."""
        return None if oid in self._freed or oid[0] in self._dead else self.create(oid)

    def grant(self, oid: ObjectId, giver: int, to: int) -> OwnedObject | None:
        """Record that ``giver`` passes a reference to ``to``. Return an object that this frees."""
        if giver in self._dead:  # the holders are queried instead
            return None
        if to in self._dead:  # the dead worker may have passed the reference on
            found = self._expect(oid)
            if found is not None:
                self._inquire(oid, found, to)
            return None
        return self._change(oid, giver, to, 1)

    def release(self, oid: ObjectId, giver: int, holder: int) -> OwnedObject | None:
        """Record that ``holder`` has dropped a reference from ``giver``.

        Return the object if that frees it.
        """
        return self._change(oid, giver, holder, -1)

    def answer(self, oid: ObjectId, giver: int, holder: int, count: int) -> OwnedObject | None:
        """Record that ``holder`` has ``count`` references from the dead ``giver``, and will get no
        more. Return the object if that frees it.
        """
        found = self._objects.get(oid)
        if found is None or (giver, holder) not in found.awaited:
            return None
        found.awaited.discard((giver, holder))
        del found.counts[giver, holder]
        if count:
            found.counts[giver, holder] = count
        return self._free_if_unused(oid, found)

    def forget_worker(self, rank: int, how: str) -> list[OwnedObject]:
        """Drop the references of the dead worker ``rank``. Messages from it that other threads are
        still reading have no effect.

        Return the objects that the worker had yet to create, and never will.
        """
        self._dead[rank] = how
        orphans: list[OwnedObject] = []
        for oid, found in list(self._objects.items()):
            if oid[0] == rank and not found.created:
                del self._objects[oid]
                orphans.append(found)
                continue
            unanswered = {(giver, worker) for giver, worker in found.awaited if worker == rank}
            found.awaited -= unanswered
            if unanswered or any(rank in pair for pair in found.counts):
                self._inquire(oid, found, rank)
            for giver, holder in list(found.counts):
                # Grants of the dead worker that have not arrived never will.
                if holder == rank or (giver == rank and found.counts[giver, holder] < 0):
                    del found.counts[giver, holder]
            self._free_if_unused(oid, found)
        return orphans

    def _inquire(self, oid: ObjectId, found: OwnedObject, giver: int) -> None:
        """Queue queries to all live workers about their references from the dead ``giver``."""
        if giver in found.queried:
            return
        found.queried.add(giver)
        for worker in range(self._size):
            if worker not in self._dead:
                found.awaited.add((giver, worker))
                self.questions.append((worker, giver, oid))

    def _expect(self, oid: ObjectId) -> OwnedObject | None:
        """Return an object, or None if it was freed or its creator is dead."""
        found = self._objects.get(oid)
        if found is None and oid not in self._freed and oid[0] not in self._dead:
            found = self._objects[oid] = OwnedObject(self._make(oid))
        return found

    def _change(self, oid: ObjectId, giver: int, holder: int, by: int) -> OwnedObject | None:
        found = None if holder in self._dead else self._expect(oid)
        if found is None or (giver in self._dead and found.counts[giver, holder] + by < 0):
            return None
        found.counts[giver, holder] += by
        if not found.counts[giver, holder]:
            del found.counts[giver, holder]
        return self._free_if_unused(oid, found)

    def _free_if_unused(self, oid: ObjectId, found: OwnedObject) -> OwnedObject | None:
        if not found.created or found.counts or found.awaited:
            return None
        del self._objects[oid]
        self._freed[oid] = None
        if len(self._freed) > _REMEMBERED:
            self._freed.popitem(last=False)
        return found
