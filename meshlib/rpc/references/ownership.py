"""Which objects live on this worker for others, and how long: counting by grants.

An object lives while somebody holds a reference to it. Its owner counts, for each pair of workers,
the references that the one gave to the other and has not heard of again. Who passes a reference on
tells the owner (a *grant*) before anything that it tells it later, the release of its own reference
above all: messages from one worker to the owner arrive in their order, and no others need to. So
the grant and the release of one reference may arrive in any order, and a count may be negative for
a while; but as long as a reference exists anywhere, or is on its way, some count is not zero: that
of the reference, or of the one that it came from, up to the first. No message waits for an answer.
(``tests/meshlib/rpc/test_ownership.py`` has the model, with workers that die.)

A reference that was granted, and whose request was lost with its connection, is released by the
worker that it should have come to (``losses``).

A dead worker's references are dropped. What it gave to others is not known for certain: a grant
may have been lost with it, or a reference whose grant arrived. So where it may have had a
reference, all others are asked what they have of it, and the object lives until they have answered.
Each does when nothing more can come from the dead; what it says replaces the count. Who dies before
it has answered may have passed on what it had of the first, so the others are asked about it, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from meshlib.calls.future import Future
from meshlib.rpc.errors import RRefLostError

_REMEMBERED = 1 << 16


ObjectId = tuple[int, int]
"""The worker that had an object made, and the number that it gave it."""


class Owned:
    """An object that lives here, or will: ``value`` is there when its function has ended."""

    def __init__(self, value: Future[Any]) -> None:
        self.value = value
        self.created = False
        """Whether its creator's request has arrived."""
        self.counts: Counter[tuple[int, int]] = Counter()
        """References, by who gave them to whom."""
        self.asked: set[int] = set()
        """The dead who may have had a reference, of which the others are asked."""
        self.awaited: set[tuple[int, int]] = set()
        """Who has not answered: of which dead worker, and who."""


class Ownership:
    """The objects of one worker of ``size``. Not thread-safe: its user has a lock.

    ``make(oid)`` makes the future of an object's value.
    """

    def __init__(self, make: Callable[[ObjectId], Future[Any]], size: int) -> None:
        self.questions: list[tuple[int, int, ObjectId]] = []
        """Which worker is to say what it has from a dead giver of an object; whoever asks it takes
        it from here.
        """
        self._make = make
        self._size = size
        self._objects: dict[ObjectId, Owned] = {}
        self._freed: OrderedDict[ObjectId, None] = OrderedDict()
        self._dead: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def find(self, oid: ObjectId) -> Owned:
        """Return an object; one that is not here yet is expected to come.

        Raises ``RRefLostError`` for one that was freed, or whose creator is dead.
        """
        found = self._expect(oid)
        if found is not None:
            return found
        if oid in self._freed:
            raise RRefLostError(f"the object {oid} was freed: its owner knew of no reference to it")
        raise RRefLostError(
            f"the object {oid} was never made: rank {oid[0]}, which asked for it,"
            f" {self._dead[oid[0]]}"
        )

    def create(self, oid: ObjectId) -> Owned:
        """Note that the creator's request for an object is here, and that it holds the first
        reference. Nothing for one that it has given up in the meantime (``void``).
        """
        # One that is gone, or whose creator is, nobody holds, and nobody will.
        found = self._expect(oid) or Owned(self._make(oid))
        if not found.created:
            found.created = True
            if oid in self._objects:
                self._change(oid, oid[0], oid[0], 1)
        return found

    def void(self, oid: ObjectId) -> Owned | None:
        """Note that the creator has given an object up; return it, if it is still needed."""
        return None if oid in self._freed or oid[0] in self._dead else self.create(oid)

    def grant(self, oid: ObjectId, giver: int, to: int) -> Owned | None:
        """Note that ``giver`` passes a reference to ``to``. Returns the object if that frees it."""
        if giver in self._dead:  # those to whom it gave are asked
            return None
        if to in self._dead:  # it may have passed it on
            found = self._expect(oid)
            if found is not None:
                self._inquire(oid, found, to)
            return None
        return self._change(oid, giver, to, 1)

    def release(self, oid: ObjectId, giver: int, holder: int) -> Owned | None:
        """Note that ``holder`` has dropped a reference that it had from ``giver``.

        Returns the object if that frees it.
        """
        return self._change(oid, giver, holder, -1)

    def answer(self, oid: ObjectId, giver: int, holder: int, count: int) -> Owned | None:
        """Note that ``holder`` has ``count`` references from ``giver``, which is dead, and will get
        no more. Returns the object if that frees it.
        """
        found = self._objects.get(oid)
        if found is None or (giver, holder) not in found.awaited:
            return None
        found.awaited.discard((giver, holder))
        del found.counts[giver, holder]
        if count:
            found.counts[giver, holder] = count
        return self._free_if_unused(oid, found)

    def bury(self, rank: int, how: str) -> list[Owned]:
        """Drop the references of ``rank``, which is dead. What still comes of it, read by another
        thread when it was told dead, changes nothing.

        Returns the objects that it was to create: they never will be.
        """
        self._dead[rank] = how
        orphans: list[Owned] = []
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
                # What it gave and nobody has told of yet, nobody will.
                if holder == rank or (giver == rank and found.counts[giver, holder] < 0):
                    del found.counts[giver, holder]
            self._free_if_unused(oid, found)
        return orphans

    def _inquire(self, oid: ObjectId, found: Owned, giver: int) -> None:
        """Have all others asked what they have from ``giver``, which is dead."""
        if giver in found.asked:
            return
        found.asked.add(giver)
        for worker in range(self._size):
            if worker not in self._dead:
                found.awaited.add((giver, worker))
                self.questions.append((worker, giver, oid))

    def _expect(self, oid: ObjectId) -> Owned | None:
        """Return an object that is here or will be; None for one that is gone or never comes."""
        found = self._objects.get(oid)
        if found is None and oid not in self._freed and oid[0] not in self._dead:
            found = self._objects[oid] = Owned(self._make(oid))
        return found

    def _change(self, oid: ObjectId, giver: int, holder: int, by: int) -> Owned | None:
        found = None if holder in self._dead else self._expect(oid)
        if found is None or (giver in self._dead and found.counts[giver, holder] + by < 0):
            return None
        found.counts[giver, holder] += by
        if not found.counts[giver, holder]:
            del found.counts[giver, holder]
        return self._free_if_unused(oid, found)

    def _free_if_unused(self, oid: ObjectId, found: Owned) -> Owned | None:
        if not found.created or found.counts or found.awaited:
            return None
        del self._objects[oid]
        self._freed[oid] = None
        if len(self._freed) > _REMEMBERED:
            self._freed.popitem(last=False)
        return found
