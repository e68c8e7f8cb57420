"""``ProcessGroup``: a set of ranks, and the one door through which each of their calls goes.

Order, deadlines, recording and failure are handled in ``ProcessGroup.issue`` and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from time import monotonic
from typing import Any

from meshlib.calls.lane import Lane
from meshlib.calls.lanes import Lanes
from meshlib.calls.shortcut import SHORT, Order, Shortcut, open_shortcut, resume
from meshlib.calls.work import Work
from meshlib.collectives.collectives import Collectives
from meshlib.diagnosis.event_log import announce
from meshlib.diagnosis.events import Abort
from meshlib.diagnosis.recorder import COLLECTIVE, Record
from meshlib.diagnosis.reporter import Reporter
from meshlib.groups.companions import Companions
from meshlib.groups.host import Host, Observer, Run
from transport.call import NO_ROOT, CallHeader, Kind, pack_header
from transport.communicator import Communicator
from transport.deadline import Deadline, Timeout, to_seconds
from transport.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    DistError,
    DistStoreError,
    HeaderMismatchError,
    RankFailedError,
)
from transport.reduce_op import ReduceOp
from transport.store.base import Store
from transport.store.prefix_store import PrefixStore

DRAIN_SECONDS = 5.0


class ProcessGroup(Companions, Collectives):
    """The members ``ranks``, and what they do together.

    Made by ``new_group``, by a mesh, or by ``init_process_group``; never directly. On a rank that
    is no member, ``rank()`` is -1 and every call returns None.
    """

    def __init__(
        self,
        world: Host,
        group_id: str,
        ranks: tuple[int, ...],
        backends: dict[str, str],
        timeout: float,
        desc: str,
    ) -> None:
        super().__init__(world, group_id, ranks, backends, timeout, desc)
        self._lock = threading.Lock()
        self._communicators: dict[str, Communicator] = {}
        self._making = threading.Lock()
        self._lanes = Lanes(desc or group_id, world.rank, world.adopt_thread)
        self._order = Order()
        self._peer_sequence = 0
        self.shortcut: Shortcut | None = None
        """Makes usual small calls by itself, once the members have met."""
        self._has_looked = False
        self._failure: DistError | None = None
        self._failed = threading.Event()
        self._absent: tuple[int, ...] = ()
        self._left: tuple[int, ...] = ()
        self._users_store: Store | None = None

    # ------------------------------------------------------------------ who

    @property
    def process_group(self) -> ProcessGroup:
        """The group itself."""
        return self

    @property
    def departed(self) -> tuple[int, ...]:
        """The global ranks of members that have left the job in good order."""
        return tuple(self.ranks[place] for place in self._left)

    def reached(self) -> int:
        """Return the number of the last collective that this rank issued."""
        return self._order.sequence

    def chain(self) -> tuple[int, int]:
        """Return the number of the last collective that this rank issued, and the hash of all."""
        return self._order.sequence, self._order.history

    def get_group_store(self) -> Store:
        """Return this group's own part of the job's store, for the user's keys.

        Waits on it end when the group breaks: with ``RankFailedError`` when a member is lost.
        Raises ValueError on a rank that is no member, and after the group was destroyed.
        """
        if self._rank < 0:
            raise ValueError(f"rank {self.global_rank} is no member of {self}")
        with self._making:
            store = self._users_store
            if store is None:
                store = PrefixStore(f"users/{self.id}", self.world.store.clone())
                with self._lock:
                    self._users_store, failure = store, self._failure
                if failure is not None:
                    store.end_waits(failure)
        if self._destroyed:
            store.close()
            raise self._unusable()
        return store

    # ------------------------------------------------------------------ the door

    @contextmanager
    def observed(self, observer: Observer) -> Generator[None]:
        """Call ``observer(group, header, device, run)`` before each collective, in this context.

        Before each that this rank issues, on this group or any other. The header has no sequence
        number yet. What it returns is run in the place of ``run``: itself, or something around it.
        The observer may make collectives itself (and is then called for them, too).
        Raises RuntimeError if somebody observes on behalf of this group already.
        """
        observers = self.world.observers
        if self.id in observers:
            raise RuntimeError(f"the calls of {self} are observed already; only one can do so")
        observers[self.id] = observer
        try:
            yield
        finally:
            del observers[self.id]

    def issue(
        self,
        kind: Kind,
        run: Run,
        device: str = "cpu",
        elements: int = 0,
        dtype: int = 0,
        op: int = 0,
        root: int = NO_ROOT,
        extra: int = 0,
        nbytes: int = 0,
        peer: int = COLLECTIVE,
        async_op: bool = False,
        timeout: Timeout | None = None,
    ) -> Any:
        """Make one call: ``run(communicator, call)`` at its turn.

        ``elements`` to ``extra`` are what must be equal on every member (see ``CallHeader``);
        ``dtype`` and ``op`` are wire codes. ``peer`` (a group rank or ``ANY_SOURCE``) marks a
        point-to-point call, whose tag is ``extra``. Collectives run in the order of issue; so do
        point-to-point calls with one peer, direction and tag, independently of all others.

        Returns what ``run`` returns (a ``Message`` for a receive), or a ``Work`` if ``async_op``.
        Raises ValueError for a device that has no backend and after the group was destroyed; what
        broke it if it is broken.
        """
        if device not in self.backends and not (device == "cuda" and "cpu" in self.backends):
            raise ValueError(
                f"{self} has no backend for arrays on {device!r}; it has {self.backend!r}"
            )
        world = self.world
        if world.observers and peer == COLLECTIVE:
            header = CallHeader(0, elements, root, kind, dtype, op, extra=extra)
            for observer in list(world.observers.values()):
                run = observer(self, header, device, run)
        seconds = self.seconds if timeout is None else to_seconds(timeout)
        with self._lock:
            if self._failure is not None or self._destroyed:
                self.note_told()
                raise self._unusable()
            if peer == COLLECTIVE:
                lane = self._lanes.collectives
                packed = self._order.next_header(elements, root, kind, dtype, op, extra)
            else:
                lane = self._lanes.of_peer(kind, peer, extra)
                self._peer_sequence = sequence = self._peer_sequence + 1
                packed = pack_header(sequence, elements, root, kind, dtype, op, 0, 0, extra)
            record = world.recorder.open(self.id, packed, nbytes, peer, not async_op, seconds)
            if world.log.detailed:
                run = world.log.around(run, record, self)
            inline = not async_op and lane.try_enter()
            work = None if inline else self._enqueue(lane, run, record, device)
        if work is not None:
            return work if async_op else work.outcome()
        record.started = record.issued
        try:
            result = self._run(run, record, device)
            if not self._has_looked and kind in SHORT and device == "cpu":
                self._open_shortcut()
        finally:
            lane.leave()
        if record.completion is not None:
            completion, record.completion = record.completion, None  # the record outlives it
            completion.join()
        return result

    def _resume(self, record: Record, tensor: Any, op: ReduceOp | None) -> Any:
        """Go on with what the shortcut began; the turn is its own to give back."""
        return self._run(partial(resume, tensor, op), record, "cpu")

    def _open_shortcut(self) -> None:
        self._has_looked = True
        world, lane = self.world, self._lanes.collectives
        shortcut = open_shortcut(
            self._communicators["cpu"],
            (self.id, self._resume, self._run, self._order, self._lock, *lane.parts()),
            (world.recorder, world.observers, world.log.levels),
        )
        with self._lock:
            if self._failure is None and not self._destroyed and not self._absent:
                self.shortcut = shortcut

    def _enqueue(self, lane: Lane, run: Run, record: Record, device: str) -> Work:
        continuations = self._lanes.continuations
        work = Work(lambda: f"{record.header} on {self}", self.note_told, continuations)

        def task() -> None:
            try:
                record.start()
                result = self._run(run, record, device)
                completion, record.completion = record.completion, None
                work.finish(result, completion)
            except BaseException as error:  # noqa: BLE001 (it belongs to whoever waits)
                work.fail(error)

        lane.submit(task)
        return work

    def _run(self, run: Run, record: Record, device: str) -> Any:
        """Make the call, whose turn has come; return its result.

        ``record.completion`` is the end of what a device still does for it.
        """
        if self._failure is not None:
            record.end("the group was broken before its turn came")
            raise self._told(record, self._unusable())
        if self._absent and self._break_if_deserted(record):
            record.end(str(self._failure))
            raise self._told(record, self._unusable())
        try:
            communicator = self._communicators.get(device) or self._communicator(device)
            annotate = self.world.recorder.annotate
            if annotate is None:
                result = run(communicator, record)
            else:
                with annotate(record.title):
                    result = run(communicator, record)
        except BaseException as error:
            seen = self._told(record, self._seen_by_user(record, error))
            record.end(str(seen))
            if seen is error:
                raise
            # Where a transport noticed says nothing to the user; it stays in __context__.
            raise seen from None
        record.ended = monotonic()
        if record.completion is not None:
            record.completion.explain_by(partial(self._explain, record))
        return result

    # ------------------------------------------------------------------ failure

    def fail(self, error: DistError) -> None:
        """Break the group: whoever is in a call of it, and every later call, raises ``error``."""
        with self._lock:
            news = self._failure is None
            if news:
                self._failure = error
            self.shortcut = None
            communicators = [] if self._destroyed else list(self._communicators.values())
            users_store = self._users_store
        self._failed.set()
        if users_store is not None:
            users_store.end_waits(error)
        if news:  # by this rank and by what another one reports it comes twice
            self.world.log.info("%s is broken: %s", self, error)
        self.world.note_failure(error)
        for communicator in communicators:
            communicator.abort(str(error))

    def abort(self, reason: str) -> None:
        """Break the group on all members: they raise ``DistBackendError`` with ``reason``.

        For whoever cannot make calls any more that the others wait for: those inside ``jax.jit``,
        too. Idempotent.
        """
        for group in (self, *self.companions()):
            if group._failure is None:
                message = f"{group} was aborted by rank {self.global_rank}: {reason}"
                # The others learn the reason before they see this rank's channels close.
                group._break(DistBackendError(message))
            group.note_told()

    def note_told(self) -> None:
        """Note that whoever makes the calls was told what broke the group, if it is broken."""
        if self._failure is not None:
            self.retire()

    def _told(self, record: Record, error: BaseException) -> BaseException:
        """Return ``error``, of which whoever waits for ``record``'s end is told now."""
        if record.sync:
            self.note_told()
        return error

    def do_without(self, left: Mapping[int, Collection[str]]) -> None:
        """Note that ranks have left the job: ``left`` has, by global rank, the groups (their ids)
        that it made calls on.

        If a member made none on this one, calls that need it raise ``RankFailedError``, those
        under way too; others go on. If it did, its channels tell who needs it. What it sent is
        still received.
        """
        positions = self._positions
        places = [positions[rank] for rank in left if rank in positions]
        if not places:
            return
        absent = [place for place in places if self.id not in left[self.ranks[place]]]
        with self._lock:
            self._left = (*self._left, *places)
            if absent:
                self._absent = (*self._absent, *absent)
                self.shortcut = None
            communicators = [] if self._destroyed else list(self._communicators.values())
        for communicator in communicators:
            known = communicator.lost
            for place in places:
                if place not in known:
                    self._lose(communicator, place)
        if not absent or self._destroyed:
            return
        # A call that starts from now on sees for itself who is absent.
        for record in self.world.recorder.records(self.id):
            if record.started and not record.ended:
                self._break_if_deserted(record)

    def _lose(self, communicator: Communicator, place: int) -> None:
        communicator.lose(place, f"rank {self.ranks[place]} has left the job")

    def _break_if_deserted(self, record: Record) -> bool:
        """Break the group if ``record``'s call needs a member that is absent; say whether."""
        for place in self._absent if record.peer == COLLECTIVE else (record.peer,):
            if place in self._absent:
                rank = self.ranks[place]
                left = f"rank {rank} has left the job without a call on {self}"
                needs = f"rank {self.global_rank} needs it in {record.header}, {record.site}"
                self._break(RankFailedError(f"{left}; {needs}", rank))
                return True
        return False

    def _break(self, error: DistError) -> None:
        """Break the group with ``error`` on all members, and here."""
        if self._failure is None:
            with suppress(DistStoreError):
                announce(self.world.store, Abort.of(self.id, error, self.global_rank))
            self.fail(error)

    def await_failure(self, timeout: float) -> DistError | None:
        """Return a copy of the error that broke the group, waiting up to ``timeout`` seconds."""
        if self._failure is None and timeout > 0:
            self._failed.wait(timeout)
        # A copy, because each thread that raises it adds a traceback of its own.
        return None if self._failure is None else copy(self._failure)

    def _seen_by_user(self, record: Record, error: BaseException) -> BaseException:
        """Return what the user sees for ``error``; break the group unless it is still whole."""
        if self._destroyed:
            return DistBackendError(f"{self} was destroyed while {record.header} was under way")
        if record.header.kind == Kind.RECV:
            # Nothing half-done lies on the wire.
            if isinstance(error, HeaderMismatchError):
                return CollectiveMismatchError(f"{error} ({record.header} on {self})")
            if isinstance(error, CommunicatorTimeoutError):
                return CollectiveTimeoutError(f"{error} ({record.header} on {self})")
        if isinstance(error, CommunicatorAbortedError) and (known := self.await_failure(1.0)):
            return known
        reporter = Reporter(self, self.world.store)
        if isinstance(error, DistError):
            explained = reporter.explain(record, error)
            self.fail(explained)
            return explained
        # KeyboardInterrupt, MemoryError …: the user sees it as it is, but the other members must
        # not wait for a rank that stopped in the middle.
        why = f"{type(error).__name__}: {error}".rstrip(": ")
        left = f"rank {self.global_rank} left {record.header} on {self}: {why}"
        self.fail(reporter.explain(record, RankFailedError(left, self.global_rank)))
        return error

    def _explain(self, record: Record, error: Exception, at_fault: CallHeader | None) -> Exception:
        """Return what the user sees for the ``error`` of a device's work for ``record``.

        ``at_fault`` is the call that went wrong, if it was another one.
        """
        if known := self.await_failure(0):
            self.note_told()
            return known
        if at_fault is not None and at_fault != record.header:
            mine = self.world.recorder.records(self.id)
            record = next((r for r in mine if r.header == at_fault), record)
        seen = self._seen_by_user(record, error)
        self.note_told()
        return seen if isinstance(seen, Exception) else error

    def _unusable(self) -> Exception:
        if self._failure is not None:
            return copy(self._failure)
        return ValueError(f"{self} was destroyed; make a new one")

    # ------------------------------------------------------------------ parts

    def has_communicator(self, device: str) -> bool:
        """Whether the communicator for arrays on ``device`` was made already."""
        return device in self._communicators

    def communicator(self, device: str) -> Communicator:
        """Return the communicator for arrays on ``device``, making it if there is none yet.

        Only ``issue`` makes calls on it.
        """
        return self._communicator(device)

    def _communicator(self, device: str) -> Communicator:
        communicator = self._communicators.get(device)
        if communicator is not None:
            return communicator
        # Lanes run side by side, and a member must join its group once.
        with self._making:
            communicator = self._communicators.get(device)
            if communicator is None:
                communicator = self.world.make_communicator(self, device)
                with self._lock:
                    self._communicators[device] = communicator
                    failure, left = self._failure, self._left
                for place in left:
                    self._lose(communicator, place)
                if failure is not None:
                    communicator.abort(str(failure))
            return communicator

    def release(self) -> None:
        """Let go of the channels if the group is broken and no call is under way on them."""
        with self._lock:
            if self._failure is None or self._destroyed or not self._lanes.is_idle():
                return
            communicators, self._communicators = self._communicators, {}
        for communicator in communicators.values():
            communicator.close()

    def close(self, drain: float = DRAIN_SECONDS) -> None:
        """Let calls that were issued end (at most ``drain`` seconds), then let go of everything."""
        with self._lock:
            if self._destroyed:
                return
            users_store = self._users_store
        idle = self._lanes.drain(
            Deadline.after(0 if self._failure is not None else drain),
            lambda: any(communicator.receiving for communicator in self._communicators.values()),
        )
        self._destroyed = self.retired = True
        self.shortcut = None
        if users_store is not None:
            users_store.close()
        for communicator in list(self._communicators.values()):
            for text in communicator.left_over() if self._failure is None else ():
                self.world.log.warning("%s ends with messages left: %s", self, text)
            if not idle:
                communicator.abort("the group was destroyed")
            communicator.close()
        self._lanes.join()

    def leave_behind(self, error: DistError) -> None:
        """Let go of the group in a fork of this rank's process: every call raises ``error``.

        The other members, and this one in its own process, are not to notice anything.
        """
        # Threads that are not here may have held them.
        self._lock, self._making, self._adding = (threading.Lock() for _ in range(3))
        self._failed = threading.Event()
        self._failure, self._destroyed, self.shortcut = error, True, None
        self._failed.set()
