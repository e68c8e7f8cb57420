"""The World: all global state of a rank.

A process has one World. A thread may have its own World, so that ranks can be threads. A World has
the store, the members of the job (``membership``), the groups (``registry``), the flight recorder,
and the watcher of the job's log with its listener.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar, Protocol, Self

from meshlib._calls.call_queue import DRAIN_SECONDS
from meshlib._calls.context import Observer
from meshlib._calls.failures.reporter import REASON_SECONDS
from meshlib._calls.members import Members
from meshlib._calls.state import GroupState
from meshlib._diagnosis.stalls import StallDetector
from meshlib._diagnosis.watcher import Watcher
from meshlib._events.events import RankLost
from meshlib._events.log import publish
from meshlib._groups.backend import STAGED, make_device_communicator
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.leaving import announce_departure, chains, count_out, find_mismatch
from meshlib._job.listener import FailureListener
from meshlib._job.meeting import join, meet, places_of, server_of
from meshlib._job.membership import Epoch, JobMembership
from meshlib._job.registry import GroupRegistry
from meshlib._job.reporting.flight_record import FlightRecord
from meshlib._job.reporting.progress import ProgressReporter
from meshlib._job.stopping import StopAgreement
from meshlib._recording.log import RankLog
from meshlib._recording.recorder import FlightRecorder, capacity_from_environment
from transport import _environment as environment
from transport._communicators import backends
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership, Runtime
from transport._errors import DistBackendError, DistError, DistStoreError
from transport._net.fork import in_forked_children, refusal
from transport._place import Place
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import sliced

DEFAULT_TIMEOUT = 1800.0
"""The default deadline of calls in seconds, as in c10d."""

LEAVE_SECONDS = 3.0  # for the events of ranks that left before this one
LINGER_SECONDS = 10.0
"""The time that the rank that serves the store waits for the other ranks to leave first."""


_IN_A_FORK = (
    "the call in that process, workers started with 'spawn' or 'forkserver', or, for a job"
    " of this process's own, destroy_process_group() and then init_process_group()"
)


class _EnteredMeshes(threading.local):
    """The meshes of the calling thread's ``with`` blocks, the innermost last."""

    def __init__(self) -> None:
        self.meshes: list[Any] = []


class RankService(Protocol):
    """A service of this rank for other ranks."""

    @property
    def workers(self) -> Sequence[Any]:
        """The workers, by rank."""
        ...

    def close(self) -> None:
        """End the service immediately. Idempotent."""
        ...


class World:
    """One rank's view of the job, from ``init_process_group`` to ``destroy_process_group``.

    The World closes ``store``, which the ``size`` ranks share. ``backends`` and ``timeout``
    (seconds) are the defaults of groups. With ``joining``, the job has begun without this rank.
    With ``alone``, the other ranks do not exist.
    """

    default_group: ProcessGroup
    """The group of all ranks of the present epoch, from ``join`` on."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        runtime: Runtime,
        backends: Mapping[str, str],
        timeout: float = DEFAULT_TIMEOUT,
        joining: bool = False,
        alone: bool = False,
    ) -> None:
        self.store = store
        self.alone: bool = alone
        self.rank = rank
        self.runtime = runtime
        self.backends: dict[str, str] = dict(backends)
        self.timeout = timeout
        self.cuda_device: int | None = None
        """The GPU to which ``device_id`` has bound this rank, if any."""
        self.log: RankLog = RankLog(rank)
        self.recorded_calls: int = capacity_from_environment()
        self.recorder: FlightRecorder = FlightRecorder(self.recorded_calls)
        self.observers: dict[str, Observer] = {}
        """See ``meshlib.extend.observe``; by the id of the observer's group."""
        self.entered: _EnteredMeshes = _EnteredMeshes()
        self.thread_id: int = threading.get_ident()
        self.breakpoints: dict[tuple[str, int], int] = {}
        self.rpc: RankService | None = None
        """The service for remote calls, if there is one."""
        self.rpc_count = 0
        self.refusal: DistBackendError | None = None
        """The error of calls in a fork of this rank's process; None in that process itself."""
        # A program may assign ranks that differ from the launcher's.
        variables = {environment.RANK: str(rank), environment.WORLD_SIZE: str(size)}
        self._as_launched = variables.items() <= os.environ.items()
        self._pid = os.getpid()
        self._joined: set[str] = set()
        self._places: dict[int, Place] = {}
        self._closers: list[Callable[[], None]] = []
        self.membership: JobMembership = JobMembership(rank, size, joining=joining, alone=alone)
        self.registry: GroupRegistry = GroupRegistry(self, self.membership, self.backends, timeout)
        self.flight_record: FlightRecord = FlightRecord(
            self.recorder, self.membership, self.registry, self.log
        )
        self.progress: ProgressReporter = ProgressReporter(
            store, self.recorder, self.membership, self.registry, self.thread_id
        )
        self.stopping: StopAgreement = StopAgreement(store, self.membership, timeout)
        self.stopping_signals: object = None
        """The signal handlers of ``should_stop``, after its first call."""
        self.listener: FailureListener = FailureListener(
            store,
            self.membership,
            self.registry,
            self.recorder,
            self.progress,
            self.stopping,
            self.thread_id,
            as_launched=self._as_launched,
        )
        in_forked_children(self, World._leave_behind)
        self._stalls: StallDetector | None = None
        self._watcher = Watcher(store, rank, self.listener)

    def join(self) -> Self:
        """Wait for the other ranks, create the default group, and return this World.

        Raises ``DistStoreError`` with the ranks that do not arrive in ``timeout`` seconds, and
        ``RankFailedError`` if a rank is lost before all have arrived; the World is then closed.
        """
        with ExitStack() as undo:
            undo.callback(self.store.close)
            undo.callback(self._watcher.close)
            undo.callback(self.progress.close)
            self._meet(Deadline.after(self.timeout))
            undo.pop_all()
        self._stalls = StallDetector(
            self.rank, self.store, self.recorder, self.thread_id, self.registry
        )
        self.default_group = self.registry.group_for(self.membership.epoch.members, desc="default")
        return self

    def _meet(self, deadline: Deadline) -> None:
        """Wait until all ranks have arrived; otherwise raise an error with the missing ranks."""
        if self.membership.joining or self.alone:
            join(self.store, self.rank)
            return
        if meet(self.store, self.rank, self.size, deadline, self._as_launched):
            self.listener.server = server_of(self.store)
            return
        # Another rank's watcher may have noticed the loss first.
        sliced(self.listener.lost.wait, REASON_SECONDS)
        lost = next(iter(self.membership.lost.values()), None)
        raise lost or DistBackendError("a rank was lost before all ranks had arrived")

    @property
    def size(self) -> int:
        """The number of ranks in the present epoch."""
        return self.membership.epoch.size

    # ------------------------------------------------------------------ groups

    def groups(self) -> list[ProcessGroup]:
        """Return the groups of this rank, the default group first."""
        return self.registry.all()

    def begin_epoch(
        self, epoch: Epoch, kept: Collection[str] = (), *, joining: bool = False
    ) -> None:
        """Continue with the members of ``epoch``, including this rank, as the default group.

        This breaks every group except those whose ids are in ``kept``, on which all members must
        agree. Later groups of the same ranks are new ones.

        ``joining``: this rank is the only member, without a place in the job.
        """
        ended = self.registry.begin_epoch(epoch.number, kept)
        self.membership.begin(epoch, joining=joining)
        self.progress.coordinates = ()
        why = f"epoch {epoch.number} of the job has begun, with {epoch.size} ranks"
        for queue in ended:
            queue.failure.fail(DistBackendError(f"{queue} has ended: {why}"))
        for queue in reversed(ended):
            queue.close(drain=0.0)
        self.default_group = self.registry.group_for(epoch.members, desc="default")

    def make_communicator(self, group: Members, device: str) -> Communicator:
        """Create the communicator of ``group`` for arrays on ``device``.

        Without a backend for that device, arrays are sent through the host by the CPU backend.
        """
        self._joined.add(group.id)
        name = group.backends.get(device, STAGED)
        places: tuple[Place, ...] = () if self.alone else self._find_places(group.ranks)
        membership = Membership(
            group=f"{group.id}/{device}",
            rank=group.rank(),
            ranks=group.ranks,
            store=PrefixStore(f"group/{group.id}/{device}", self.store),
            runtime=self.runtime,
            compression=group.compression if device == "cpu" else None,
            places=places,
        )
        if device == "cpu":
            return backends.lookup(name).make(membership)
        return make_device_communicator(membership, name, group.backends.get("cpu"))

    def _find_places(self, ranks: Sequence[int]) -> tuple[Place, ...]:
        """Return the places (hosts) of ``ranks``."""
        if unknown := [rank for rank in ranks if rank not in self._places]:
            self._places |= zip(unknown, places_of(self.store, unknown), strict=True)
        return tuple(self._places[rank] for rank in ranks)

    def adopt_thread(self) -> None:
        """Assign the calling thread to this World, if ranks are threads."""
        if (current.thread or Current.process) is not self:
            Current.in_threads, current.thread = True, self

    def note_failure(self, error: DistError) -> None:
        """Write the flight record if requested, because ``error`` has broken a group."""
        self.flight_record.note_failure(str(error))

    def announce_exit(self, how: str) -> None:
        """Announce to the other ranks that this one makes no more calls; ``how`` is the reason."""
        self.flight_record.trouble = self.flight_record.trouble or how
        with suppress(DistStoreError):  # also in a fork
            publish(self.store, RankLost(self.rank, how))

    # ------------------------------------------------------------------ the end

    def _leave_behind(self) -> None:
        """Refuse all calls in a forked child, without an effect on the other ranks."""
        why = refusal(f"rank {self.rank} of the job", self._pid, _IN_A_FORK)
        self.refusal = DistBackendError(why)
        self.flight_record.end_in_a_fork()
        self.listener.end_in_a_fork()
        self.membership.end_in_a_fork()
        self.stopping.end_in_a_fork()
        self.registry.leave_behind(self.refusal)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call ``closer()`` when this World closes; the last registered is called first."""
        self._closers.append(closer)

    def close(self, *, drain: float = DRAIN_SECONDS, linger: float = LINGER_SECONDS) -> None:
        """Leave the job in bounded time, and release everything.

        Open calls get ``drain`` seconds to end. The rank that serves the store waits up to
        ``linger`` seconds for the other ranks. Does nothing in a fork of the process.

        At the end, raises the ``CollectiveMismatchError`` that ``meshlib._job.leaving`` finds.
        """
        if self.refusal is not None:
            return
        if self.rpc is not None:
            self.rpc.close()
        queues = self.registry.queues()
        groups = [queue.state for queue in queues]
        reported = {str(group.error) for group in groups if group.retired}
        for queue in reversed(queues):
            queue.close(drain)
        mismatch = self._take_leave(groups, reported)
        if self.flight_record.trouble is not None:
            self.flight_record.write_if_requested()
        lost = len(self.membership.lost)
        self.registry.clear()
        if self._stalls is not None:
            self._stalls.close()
        self.progress.close()
        self._watcher.close()
        self.listener.close()
        count_out(self.store, self.membership.launched, lost, linger)
        self.runtime.close()
        for closer in reversed(self._closers):
            closer()
        self.store.close()
        if mismatch is not None:
            raise mismatch

    def _take_leave(self, groups: list[GroupState], reported: set[str]) -> DistError | None:
        found = chains(groups, self._joined)
        if (
            announce_departure(self.store, self.rank, found, groups, self.recorder)
            and self.size > 1
        ):
            sliced(self.listener.left.wait, LEAVE_SECONDS)
        left = self.membership.departures
        return find_mismatch(self.store, groups, found, left, self.recorder, reported)


class Current(threading.local):
    """The global state: the World of the process, and of each thread that has its own."""

    process: ClassVar[World | None] = None
    thread: World | None = None
    in_threads: ClassVar[bool] = False
    """True if a thread was ever a rank or had its own World. Otherwise calls skip the slow lookup
    of the thread's World.
    """
    gradients: ClassVar[tuple[Callable[[], Any], ...]] = ()
    """Creates the storage for gradients of remote calls, for the workers of all Worlds."""


current: Current = Current()
