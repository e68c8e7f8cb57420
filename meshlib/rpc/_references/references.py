"""The references that one worker holds, and its objects to which others refer."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from meshlib._arrays import pickling
from meshlib._arrays.pickling import Payload
from meshlib._calls.future import Future
from meshlib.rpc._calling.execution import Execution
from meshlib.rpc._calling.futures import OutgoingCall, RpcFuture, settle
from meshlib.rpc._errors import RRefLostError
from meshlib.rpc._membership.directory import WorkerDirectory
from meshlib.rpc._overdue.timer import TimerThread
from meshlib.rpc._references.counting import ObjectId, ReferenceCounts
from transport._channel.channel import Channel
from transport._channel.connection import ChannelConnection
from transport._errors import DistBackendError

RETRY_SECONDS = 0.05
"""The interval of checks whether a dead worker's last messages have been read."""


Passed = Sequence[tuple[int, ObjectId]]
"""The owner and object of each reference in a request."""
_REMEMBERED = 4096


class _Pickled(threading.local):
    """The worker for which the calling thread pickles, and the references involved."""

    def __init__(self) -> None:
        self.to: int | None = None
        self.passed = list[tuple[int, ObjectId]]()
        self.taken: list[tuple[int, ObjectId]] | None = None
        """The references in the request that the thread unpickles; None: it unpickles none."""


class References:
    """The reference counting of one worker, as a holder and as an owner. Thread-safe."""

    def __init__(
        self,
        directory: WorkerDirectory,
        channel: Channel,
        execution: Execution,
        timer: TimerThread,
    ) -> None:
        self._directory = directory
        self._channel = channel
        self._execution = execution
        self._timer = timer
        self._rank = directory.rank
        self._losses = LostRequests(self._is_settled)
        self._lock = threading.RLock()
        self._objects = ReferenceCounts(lambda oid: RpcFuture(execution, oid), directory.size)
        self._here = _Pickled()
        # Each received (1) or dropped (-1) reference: its owner, object and giver.
        self._changes: deque[tuple[int, ObjectId, int, int]] = deque()
        self._woken = False
        # The references from other workers; used only in the thread of ``tick``.
        self._held: Counter[tuple[int, ObjectId, int]] = Counter()
        self._questions: list[tuple[int, int, list[ObjectId]]] = []

    # ------------------------------------------------------------------ as a holder

    def dump(
        self, value: object, to: int | None, passed: list[tuple[int, ObjectId]] | None = None
    ) -> Payload:
        """Pickle ``value`` for the worker ``to``, and grant the references in it.

        The references are appended to ``passed``. If ``to`` is None, ``value`` must have none.
        """
        here = self._here
        passed = list[tuple[int, ObjectId]]() if passed is None else passed
        before = here.to, here.passed
        here.to, here.passed = to, passed
        try:
            payload = pickling.dump(value)
        finally:
            here.to, here.passed = before
        for owner, oid in passed:
            self._post(owner, ("grant", oid, to))
        return payload

    def load(self, caller: int, number: int, data: bytes | memoryview, buffers: Any) -> Any:
        """Unpickle a request, and record the references in it."""
        here = self._here
        here.taken = taken = list[tuple[int, ObjectId]]()
        try:
            return pickling.load(data, buffers)
        finally:
            here.taken = None
            if taken:
                self._losses.arrived(caller, number, taken)

    def lose(self, to: int, calls: Iterable[OutgoingCall]) -> None:
        """Report requests with references to the worker ``to`` that did not reach it: their
        connection broke, or it could not unpickle them.
        """
        if lost := [(call.number, call.passed) for call in calls if call.passed]:
            self._post(to, ("lost", lost))

    @property
    def pickled_for(self) -> int | None:
        """The rank of the worker for which the calling thread pickles, or None."""
        return self._here.to

    def pass_on(self, owner: int, oid: ObjectId) -> int:
        """Record that a reference is being pickled; return the rank of its giver.

        Raises RuntimeError outside of calls.
        """
        here = self._here
        if here.to is None:
            raise RuntimeError(
                "an RRef can only be pickled as part of a remote call's arguments or result:"
                " its owner must know its holders"
            )
        here.passed.append((owner, oid))
        return self._rank

    def take(self, owner: int, oid: ObjectId, giver: int) -> None:
        """Record that a reference has arrived."""
        taken = self._here.taken
        if taken is not None:
            taken.append((owner, oid))
        self._changes.append((owner, oid, giver, 1))

    def drop(self, owner: int, oid: ObjectId, giver: int) -> None:
        """Record that a reference was dropped. Takes no lock, so ``__del__`` may call this."""
        self._changes.append((owner, oid, giver, -1))
        if not self._woken:
            self._woken = True
            self._timer.notify()

    def give_up(self, owner: int, oid: ObjectId, why: str) -> None:
        """Notify the owner that this worker abandons an object, whose creation failed."""
        self._post(owner, ("void", oid, why))

    def tick(self) -> float | None:
        """Report dropped references to their owners, and answer the owners' queries.

        Return the seconds until the next tick, or None. Called by the timer.
        """
        with self._lock:
            # Checked before the changes are counted, so an answer covers all messages of the dead
            # worker.
            over = {giver for _, giver, _ in self._questions if self._is_over(giver)}
            ready = [question for question in self._questions if question[1] in over]
            self._questions = [question for question in self._questions if question[1] not in over]
            waits = bool(self._questions)
        self._release_dropped()
        for giver, passed in self._losses.settle():
            for owner, oid in passed:
                self._post(owner, ("release", [(oid, giver)]))
        for owner, giver, oids in ready:
            counts = [(oid, self._held[owner, oid, giver]) for oid in oids]
            self._post(owner, ("held", giver, counts))
        return RETRY_SECONDS if waits or self._losses else None

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
            self._post(owner, ("release", released))

    def _post(self, owner: int, notice: object) -> None:
        if owner == self._rank:
            self.on_notice(owner, notice)
        else:
            self._channel.post(owner, pickling.dump(notice).data)

    def _is_over(self, rank: int) -> bool:
        """Return whether a worker is dead, and all its messages have been unpickled."""
        if rank not in self._directory.lost:
            return False
        connected = any(one.peer == rank for one in self._channel.connections())
        return not connected and self._execution.has_begun_all_of(rank)

    def _is_settled(self, rank: int, number: int) -> bool:
        """Return whether a request of a broken connection was unpickled, or never will be."""
        drained = self._channel.is_drained(rank)
        return drained and self._execution.has_begun((rank, number))

    # ------------------------------------------------------------------ as an owner

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)

    def create(self, oid: ObjectId) -> Future[Any]:
        """Return the future of a new object's value. Its creator holds the first reference."""
        with self._lock:
            return self._objects.create(oid).value

    def value_of(self, oid: ObjectId) -> Future[Any]:
        """Return the future of an object's value. Raises ``RRefLostError``."""
        with self._lock:
            return self._objects.find(oid).value

    def on_post(self, connection: ChannelConnection, data: bytes | memoryview) -> None:
        """Handle a notice about references from the connection's peer."""
        notice = pickling.load(data)
        if notice[0] == "lost":
            self._channel.end_earlier(connection)
        self.on_notice(connection.peer, notice)

    def on_notice(self, rank: int, notice: Any) -> None:
        """Handle a notice about references from the worker ``rank``."""
        freed: list[object] = []  # their finalizers run without the lock
        match notice:
            case ("grant", oid, to):
                with self._lock:
                    freed.append(self._objects.grant(oid, rank, to))
                self._post_questions()
            case ("release", released):
                with self._lock:
                    for oid, giver in released:
                        freed.append(self._objects.release(oid, giver, rank))
            case ("whose", giver, oids):
                with self._lock:
                    self._questions.append((rank, giver, oids))
                self._timer.notify()
            case ("lost", lost):
                self._losses.failed(rank, lost)
                self._timer.notify()
            case ("held", giver, counts):
                with self._lock:
                    for oid, count in counts:
                        freed.append(self._objects.answer(oid, giver, rank, count))
            case ("void", oid, why):
                with self._lock:
                    found = self._objects.void(oid)
                if found is not None:
                    settle(found.value, None, RRefLostError(why))
            case _:
                raise DistBackendError(f"expected a notice of references, got {notice!r}")

    def forget_worker(self, rank: int, how: str) -> None:
        """Drop the references of a dead worker, which ended as ``how`` says."""
        with self._lock:
            orphans = self._objects.forget_worker(rank, how)
        who = self._directory.describe(rank)
        for orphan in orphans:
            why = f"the object was never created: its creator, {who}, {how}"
            settle(orphan.value, None, RRefLostError(why))
        self._post_questions()

    def _post_questions(self) -> None:
        """Send the queued queries about references from dead workers."""
        if not self._objects.questions:
            return
        with self._lock:
            questions, self._objects.questions = self._objects.questions, []
        grouped: dict[tuple[int, int], list[ObjectId]] = {}
        for worker, giver, oid in questions:
            grouped.setdefault((worker, giver), []).append(oid)
        for (worker, giver), oids in grouped.items():
            self._post(worker, ("whose", giver, oids))


class LostRequests:
    """The references in requests that were lost with their connection while both workers live, or
    that could not be unpickled. Thread-safe.

    The owner has counted the grant. Only the receiver knows whether the reference arrived, so the
    giver sends it the failed requests. The receiver releases the references that never arrived, as
    if it had dropped them at once. If the giver dies before, the owner queries the holders; if
    the receiver dies, its references are dropped.

    ``is_settled(caller, number)`` returns whether a request has been unpickled, or never will be.
    """

    def __init__(self, is_settled: Callable[[int, int], bool]) -> None:
        self._is_settled = is_settled
        self._lock = threading.Lock()
        self._arrived: dict[int, OrderedDict[int, Passed]] = {}
        self._forgotten: dict[int, int] = {}
        self._failed: list[tuple[int, int, Passed]] = []

    def arrived(self, caller: int, number: int, taken: Passed) -> None:
        """Record the references in a request that has arrived."""
        with self._lock:
            arrived = self._arrived.setdefault(caller, OrderedDict())
            arrived[number] = taken
            if len(arrived) > _REMEMBERED:
                first, _ = arrived.popitem(last=False)
                self._forgotten[caller] = max(first, self._forgotten.get(caller, 0))

    def failed(self, caller: int, lost: Sequence[tuple[int, Passed]]) -> None:
        """Record the failed requests of a worker: the number and the references of each."""
        with self._lock:
            self._failed += [(caller, number, passed) for number, passed in lost]

    def settle(self) -> list[tuple[int, Passed]]:
        """Return the references that will never arrive, by giver, and forget them."""
        with self._lock:
            found: list[tuple[int, Passed]] = []
            left: list[tuple[int, int, Passed]] = []
            for caller, number, passed in self._failed:
                if not self._is_settled(caller, number):
                    left.append((caller, number, passed))
                elif missing := self._missing(caller, number, passed):
                    found.append((caller, missing))
            self._failed = left
        return found

    def __bool__(self) -> bool:
        return bool(self._failed)

    def _missing(self, caller: int, number: int, passed: Passed) -> Passed:
        # Forgotten requests count as arrived: this may keep an object too long, but never frees it.
        if number <= self._forgotten.get(caller, 0):
            return []
        left = Counter(passed)
        left.subtract(self._arrived.get(caller, {}).get(number, ()))
        return [*left.elements()]
