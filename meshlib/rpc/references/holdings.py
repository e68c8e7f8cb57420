"""What a worker tells about references, and what it is told: grants and releases on their way."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from meshlib.calls.future import Future
from meshlib.rpc.calls import Outgoing, RpcFuture, settle
from meshlib.rpc.errors import RRefLostError
from meshlib.rpc.references.ownership import ObjectId, Owned, Ownership
from meshlib.rpc.wire.payload import Payload, Pickling, load
from transport.errors import DistBackendError

if TYPE_CHECKING:
    from meshlib.rpc.agent import Agent

ASK_AGAIN_SECONDS = 0.05
"""Whoever is asked about the dead looks so often whether something still comes from it."""


Passed = Sequence[tuple[int, ObjectId]]
"""The references in a request: each one's owner and object."""
_REMEMBERED = 4096


class _Pickled(threading.local):
    """What the calling thread is pickling: for whom, and the references that it passes."""

    def __init__(self) -> None:
        self.to: int | None = None
        self.passed = list[tuple[int, ObjectId]]()
        self.taken: list[tuple[int, ObjectId]] | None = None
        """Those that came with the request that the thread unpickles."""


class Holdings:
    """The references of one worker of ``size``, and its objects. Any thread."""

    def __init__(self, agent: Agent, size: int) -> None:
        self._agent = agent
        self._rank = agent.rank
        self._losses = Losses(self._is_settled)
        self._lock = threading.RLock()
        self._objects = Ownership(self._make, size)
        self._here = _Pickled()
        self._pickling = Pickling()
        # What came (1) and went (-1): the reference's owner, object and giver, in this order.
        self._changes: deque[tuple[int, ObjectId, int, int]] = deque()
        self._woken = False
        # Only the thread of ``tick``: how many there are, of those that others gave.
        self._held: Counter[tuple[int, ObjectId, int]] = Counter()
        self._questions: list[tuple[int, int, list[ObjectId]]] = []

    # ------------------------------------------------------------------ as a holder

    def dump(
        self, value: object, to: int | None, passed: list[tuple[int, ObjectId]] | None = None
    ) -> Payload:
        """Return ``value`` as it travels to worker ``to``; references in it are granted first.

        None: to nobody in particular, and there must be none. They are appended to ``passed``.
        """
        here = self._here
        passed = list[tuple[int, ObjectId]]() if passed is None else passed
        before = here.to, here.passed
        here.to, here.passed = to, passed
        try:
            payload = self._pickling.dump(value)
        finally:
            here.to, here.passed = before
        for owner, oid in passed:
            self._tell(owner, ("grant", oid, to))
        return payload

    def load(self, caller: int, number: int, data: bytes | memoryview, buffers: Any) -> Any:
        """Return what a request has brought, and remember which references were in it."""
        here = self._here
        here.taken = taken = list[tuple[int, ObjectId]]()
        try:
            return load(data, buffers)
        finally:
            here.taken = None
            if taken:
                self._losses.arrived(caller, number, taken)

    def lose(self, to: int, calls: Iterable[Outgoing]) -> None:
        """Tell a worker which requests to it have failed, with their connection or since it could
        not unpickle them, and the references in them.
        """
        if lost := [(call.number, call.passed) for call in calls if call.passed]:
            self._tell(to, ("lost", lost))

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
        return self._rank

    def take(self, owner: int, oid: ObjectId, giver: int) -> None:
        """Note that a reference came."""
        taken = self._here.taken
        if taken is not None:
            taken.append((owner, oid))
        self._changes.append((owner, oid, giver, 1))

    def drop(self, owner: int, oid: ObjectId, giver: int) -> None:
        """Note that a reference is gone. Takes no lock: for ``__del__``."""
        self._changes.append((owner, oid, giver, -1))
        if not self._woken:
            self._woken = True
            self._agent.clock.ring()

    def give_up(self, owner: int, oid: ObjectId, why: str) -> None:
        """Tell the owner that an object will not be made: the request was lost, or is too late."""
        self._tell(owner, ("void", oid, why))

    def tick(self) -> float | None:
        """Tell the owners of the references that are gone, and answer those who ask. Returns after
        how many seconds to look again, if there is need.
        """
        with self._lock:
            # In this order: an answer is the last word on what came from the dead.
            over = {giver for _, giver, _ in self._questions if self._is_over(giver)}
            ready = [asked for asked in self._questions if asked[1] in over]
            self._questions = [asked for asked in self._questions if asked[1] not in over]
            waits = bool(self._questions)
        self._release_dropped()
        for giver, passed in self._losses.settle():
            for owner, oid in passed:
                self._tell(owner, ("release", [(oid, giver)]))
        for owner, giver, oids in ready:
            said = [(oid, self._held[owner, oid, giver]) for oid in oids]
            self._tell(owner, ("held", giver, said))
        return ASK_AGAIN_SECONDS if waits or self._losses else None

    def _release_dropped(self) -> None:
        self._woken = False
        by_owner: dict[int, list[tuple[ObjectId, int]]] = {}
        while self._changes:
            owner, oid, giver, by = self._changes.popleft()
            if giver != self._rank:
                self._held[owner, oid, giver] += by
                if not self._held[owner, oid, giver]:
                    del self._held[owner, oid, giver]
            if by < 0:
                by_owner.setdefault(owner, []).append((oid, giver))
        for owner, released in by_owner.items():
            self._tell(owner, ("release", released))

    def _tell(self, owner: int, notice: object) -> None:
        if owner == self._rank:
            self.hear(owner, notice)
        else:
            self._agent.peers.tell(owner, notice)

    def _is_over(self, rank: int) -> bool:
        """Whether a worker is dead, and all that came from it was unpickled."""
        agent = self._agent
        return agent.peers.is_over(rank) and agent.server.has_begun_all_of(rank)

    def _is_settled(self, rank: int, number: int) -> bool:
        """Whether a request, whose connection broke, was unpickled or never will be."""
        agent = self._agent
        return agent.peers.is_drained(rank) and agent.server.has_begun((rank, number))

    # ------------------------------------------------------------------ as an owner

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)

    def _make(self, oid: ObjectId) -> RpcFuture:
        """Return the future of an object's value."""
        value = RpcFuture(self._agent)
        value.object = oid
        return value

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
                    freed.append(self._objects.grant(oid, rank, to))
                self._ask()
            case ("release", released):
                with self._lock:
                    for oid, giver in released:
                        freed.append(self._objects.release(oid, giver, rank))
            case ("whose", giver, oids):
                with self._lock:
                    self._questions.append((rank, giver, oids))
                self._agent.clock.ring()
            case ("lost", lost):
                self._losses.told(rank, lost)
                self._agent.clock.ring()
            case ("held", giver, said):
                with self._lock:
                    for oid, count in said:
                        freed.append(self._objects.answer(oid, giver, rank, count))
            case ("void", oid, why):
                with self._lock:
                    found = self._objects.void(oid)
                if found is not None:
                    settle(found.value, None, RRefLostError(why))
            case _:
                raise DistBackendError(f"expected news of references, got {notice!r}")

    def bury(self, rank: int, how: str, who: str) -> None:
        """Drop what ``rank``, which messages call ``who``, held: it is dead."""
        with self._lock:
            orphans = self._objects.bury(rank, how)
        for orphan in orphans:
            why = f"the object was never made: {who}, which asked for it, {how}"
            settle(orphan.value, None, RRefLostError(why))
        self._ask()

    def _ask(self) -> None:
        """Ask what references others have from the dead."""
        if not self._objects.questions:
            return
        with self._lock:
            questions, self._objects.questions = self._objects.questions, []
        grouped: dict[tuple[int, int], list[ObjectId]] = {}
        for worker, giver, oid in questions:
            grouped.setdefault((worker, giver), []).append(oid)
        for (worker, giver), oids in grouped.items():
            self._tell(worker, ("whose", giver, oids))


class Losses:
    """References in requests that were lost with their connection, while both workers live, or that
    could not be unpickled. Any thread.

    Their owner was told that they were given. Whether they arrived, only the worker knows to which
    they went: so that one, told by the giver which requests have failed, releases those that it
    never got, as if it had dropped them at once. If the giver dies before, the owner asks what is
    left of what it gave; if the other one does, nothing is.

    ``is_settled(caller, number)`` says whether a request has been unpickled, or never will be.
    """

    def __init__(self, is_settled: Callable[[int, int], bool]) -> None:
        self._is_settled = is_settled
        self._lock = threading.Lock()
        self._arrived: dict[int, OrderedDict[int, Passed]] = {}
        self._forgotten: dict[int, int] = {}
        self._told: list[tuple[int, int, Passed]] = []

    def arrived(self, caller: int, number: int, taken: Passed) -> None:
        """Note which references came with a request."""
        with self._lock:
            arrived = self._arrived.setdefault(caller, OrderedDict())
            arrived[number] = taken
            if len(arrived) > _REMEMBERED:
                first, _ = arrived.popitem(last=False)
                self._forgotten[caller] = max(first, self._forgotten.get(caller, 0))

    def told(self, caller: int, lost: Sequence[tuple[int, Passed]]) -> None:
        """Note that requests of a worker, by number, have failed."""
        with self._lock:
            self._told += [(caller, number, passed) for number, passed in lost]

    def settle(self) -> list[tuple[int, Passed]]:
        """Return what never arrived and never will, by who gave it; each once."""
        with self._lock:
            found: list[tuple[int, Passed]] = []
            left: list[tuple[int, int, Passed]] = []
            for caller, number, passed in self._told:
                if not self._is_settled(caller, number):
                    left.append((caller, number, passed))
                elif missing := self._missing(caller, number, passed):
                    found.append((caller, missing))
            self._told = left
        return found

    def __bool__(self) -> bool:
        return bool(self._told)

    def _missing(self, caller: int, number: int, passed: Passed) -> Passed:
        # What is not known any more counts as arrived: rather kept too long than freed too early.
        if number <= self._forgotten.get(caller, 0):
            return []
        left = Counter(passed)
        left.subtract(self._arrived.get(caller, {}).get(number, ()))
        return [*left.elements()]
