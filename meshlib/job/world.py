"""The World: all that is global about a rank, in one place.

A process has one World; a thread may have one of its own, so that ranks can be threads. It holds
the store, who is there (``membership``), the groups (``registry``), what is heard of other ranks
(``hearing``), the flight recorder and the watcher.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from meshlib.calls.context import Observer
from meshlib.calls.failures.reporter import NEWS_SECONDS
from meshlib.calls.members import Members
from meshlib.diagnosis.stalls import StallDetector
from meshlib.diagnosis.watcher import Watcher
from meshlib.events.events import RankLost
from meshlib.events.log import publish
from meshlib.groups.backend import STAGED, make_device_communicator
from meshlib.groups.process_group import DRAIN_SECONDS, ProcessGroup
from meshlib.job.current import adopt_thread
from meshlib.job.hearing import Hearing
from meshlib.job.leaving import chains, count_out, find_mismatch, say_goodbye
from meshlib.job.meeting import join, meet, server_of
from meshlib.job.membership import Epoch, JobMembership
from meshlib.job.registry import GroupRegistry
from meshlib.job.seen import Seen
from meshlib.recording.log import RankLog
from meshlib.recording.recorder import FlightRecorder, Record, capacity_from_environment
from meshlib.trace import writing
from transport import environment
from transport.communicators import backends
from transport.communicators.base import Communicator
from transport.communicators.runtime import Membership, Runtime
from transport.deadline import Deadline
from transport.errors import DistBackendError, DistError, DistStoreError
from transport.net.fork import in_forked_children, refusal
from transport.store.base import Store
from transport.store.prefix_store import PrefixStore

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a call waits when nobody says otherwise: c10d's default."""

LEAVE_SECONDS = 3.0  # for the news of who left before this rank
LINGER_SECONDS = 10.0
"""How long the rank that serves the store waits for the others to leave before it does."""


_IN_A_FORK = (
    "the call in that process, workers started with 'spawn' or 'forkserver', or, for a job"
    " of this process's own, destroy_process_group() and then init_process_group()"
)


class _Entered(threading.local):
    """The meshes whose ``with`` blocks each thread is in, the innermost last."""

    def __init__(self) -> None:
        self.meshes: list[Any] = []


class Service(Protocol):
    """Something that serves other ranks on behalf of this one."""

    @property
    def workers(self) -> Sequence[Any]:
        """What stands for each rank, by rank."""
        ...

    def close(self) -> None:
        """End it, at once. Idempotent."""
        ...


class Recorded(Protocol):
    """What keeps records of its own: like a group's, in a dump."""

    id: str
    ranks: tuple[int, ...]
    workers: Sequence[str]

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        ...

    def records(self) -> list[Record]:
        """Return the records, oldest first."""
        ...


class World:
    """One rank's view of the job. Made by ``init_process_group``, closed by its counterpart."""

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
    ) -> None:
        self.store = store
        self.rank = rank
        self.membership: JobMembership = JobMembership(rank, size, joining=joining)
        self.runtime = runtime
        self.backends: dict[str, str] = dict(backends)
        self.timeout = timeout
        self.cuda_device: int | None = None
        """The GPU that this rank was bound to from the start, if it was."""
        self.log: RankLog = RankLog(rank)
        self.recorded_calls: int = capacity_from_environment()
        self.recorder: FlightRecorder = FlightRecorder(self.recorded_calls)
        self.calls: Recorded | None = None
        """The records of remote calls, once there were such."""
        self.observers: dict[str, Observer] = {}
        """See ``ProcessGroup.observed``; by the id of the group on whose behalf they look."""
        self.entered: _Entered = _Entered()
        self.thread_id: int = threading.get_ident()
        self.breakpoints: dict[tuple[str, int], int] = {}
        # Ranks that were started by a launcher may have numbers of their own.
        variables = {environment.RANK: str(rank), environment.WORLD_SIZE: str(size)}
        self._as_launched = variables.items() <= os.environ.items()
        self._pid = os.getpid()
        self.registry: GroupRegistry = GroupRegistry(
            self, self.membership, self.backends, timeout, self._on_made
        )
        self._joined: set[str] = set()
        self._closers: list[Callable[[], None]] = []
        self.rpc: Service | None = None
        """The agent of remote calls, where there is one."""
        self.rpc_count = 0
        self._trouble: str | None = None
        self._dumping = threading.Lock()
        self.refusal: DistBackendError | None = None
        """What calls raise in a fork of this rank's process; None in that process itself."""
        self.seen: Seen = Seen(store, self.recorder, self.membership, self.groups, self.thread_id)
        self.hearing: Hearing = Hearing(
            store,
            self.membership,
            self.registry,
            self.recorder,
            self.seen,
            self.thread_id,
            as_launched=self._as_launched,
        )
        in_forked_children(self, World._leave_behind)
        self._watcher = Watcher(store, rank, self.hearing.hear, self.hearing.hear_silence)
        try:
            self._meet(Deadline.after(timeout))
        except BaseException:
            self.seen.close()
            self._watcher.close()
            store.close()
            raise
        standings = self.registry.standings
        self._stalls = StallDetector(rank, store, self.recorder, self.thread_id, standings)
        members = self.membership.epoch.members
        self.default_group: ProcessGroup = self.registry.group_for(members, desc="default")

    @property
    def size(self) -> int:
        """The number of ranks in the present epoch."""
        return self.membership.epoch.size

    # ------------------------------------------------------------------ groups

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that this rank has made, the default group first."""
        return self.registry.all()

    def begin_epoch(
        self, epoch: Epoch, kept: Collection[str] = (), *, joining: bool = False
    ) -> None:
        """Go on with the members of ``epoch``, this rank among them: they are the default group.

        Every group is broken here, and another follows it for the same ranks, but for those whose
        ids are ``kept``: all members must agree on them. ``joining``: this rank is the only member,
        and has no place among the others.
        """
        ended = self.registry.begin_epoch(epoch.number, kept)
        self.membership.begin(epoch, joining=joining)
        self.seen.coordinates = ()
        why = f"epoch {epoch.number} of the job has begun, with {epoch.size} ranks"
        for group in ended:
            group.fail(DistBackendError(f"{group} has ended: {why}"))
        for group in reversed(ended):
            group.close(drain=0.0)
        self.default_group = self.registry.group_for(epoch.members, desc="default")

    def make_communicator(self, group: Members, device: str) -> Communicator:
        """Make the communicator of ``group`` for arrays on ``device``.

        Without a backend for that device they travel by way of the host and the CPU's backend.
        """
        self._joined.add(group.id)
        name = group.backends.get(device, STAGED)
        membership = Membership(
            group=f"{group.id}/{device}",
            rank=group.rank(),
            ranks=group.ranks,
            store=PrefixStore(f"group/{group.id}/{device}", self.store),
            runtime=self.runtime,
            compression=group.compression if device == "cpu" else None,
        )
        if device == "cpu":
            return backends.lookup(name).make(membership)
        return make_device_communicator(membership, name, group.backends.get("cpu"))

    def adopt_thread(self) -> None:
        """Have the calling thread find this World, where ranks are threads."""
        adopt_thread(self)

    def _on_made(self, group: ProcessGroup) -> None:
        if self.refusal is not None:
            group.leave_behind(self.refusal)
            return
        seconds, backends = group.seconds, group.backends
        self.log.info("%s has id %s, backends %s, timeout %g s", group, group.id, backends, seconds)
        self.hearing.tell_group(group)

    def announce_exit(self, how: str) -> None:
        """Tell the other ranks that this one will not make another call; ``how`` says why."""
        self._trouble = self._trouble or how
        with suppress(DistStoreError):  # also in a fork
            publish(self.store, RankLost(self.rank, how))

    # ------------------------------------------------------------------ flight record

    def note_failure(self, error: DistError) -> None:
        """Write the flight record where the launcher said: a group broke with ``error``."""
        if self._trouble is None:
            self._trouble = str(error)
            self.dump_if_asked()

    def dump(self, directory: str | Path) -> Path:
        """Write this rank's flight record into ``directory`` and return the file's path.

        ``meshlib trace DIRECTORY`` merges the ranks' files. Raises OSError.
        """
        records, groups = self.recorder.records(), [*self.groups()]
        calls, workers = self.calls, ()
        if calls is not None:
            records += calls.records()
            groups, workers = [*groups, calls], calls.workers
        everything = writing.as_dict(self.rank, self.size, records, groups, self._trouble, workers)
        return writing.write(directory, everything)

    def dump_if_asked(self) -> None:
        """Write this rank's flight record where the launcher said, if it did."""
        directory = os.environ.get(environment.TRACE_DIR)
        if directory:
            try:
                # The watcher and the rank's own thread may both come here: the newest record stays.
                with self._dumping:
                    self.dump(directory)
            except OSError as error:
                self.log.warning("the flight record was not written: %s", error)

    # ------------------------------------------------------------------ begin and end

    def _meet(self, deadline: Deadline) -> None:
        """Return when all ranks are here; else raise an error that names who is missing."""
        if self.membership.joining:
            join(self.store, self.rank)
            return
        if meet(self.store, self.rank, self.size, deadline, self._as_launched):
            self.hearing.server = server_of(self.store)
            return
        # Another rank's watcher may have been faster than this one's.
        self.hearing.bad_news.wait(NEWS_SECONDS)
        lost = next(iter(self.membership.lost.values()), None)
        raise lost or DistBackendError("a rank was lost before all had come")

    def _leave_behind(self) -> None:
        """Refuse all calls from now on, and say nothing to anybody: this is a forked child."""
        why = refusal(f"rank {self.rank} of the job", self._pid, _IN_A_FORK)
        self.refusal = DistBackendError(why)
        self._dumping = threading.Lock()  # a thread that is not here may have held it
        self.hearing.end_in_a_fork()
        self.membership.end_in_a_fork()
        self.registry.end_in_a_fork()
        for group in self.groups():
            group.leave_behind(self.refusal)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Have ``closer()`` called when this World closes, the last registered first."""
        self._closers.append(closer)

    def close(self, *, drain: float = DRAIN_SECONDS, linger: float = LINGER_SECONDS) -> None:
        """End this rank's part in the job, in bounded time; nothing of it is left.

        Calls that were issued get ``drain`` seconds to end. The rank that serves the store stays
        for the others for at most ``linger`` seconds. Does nothing in a fork of its process.

        Raises ``CollectiveMismatchError`` at the end for what ``meshlib.job.leaving`` finds.
        """
        if self.refusal is not None:
            return
        if self.rpc is not None:
            self.rpc.close()
        groups = self.groups()
        told = {str(group.await_failure(0)) for group in groups if group.retired}
        for group in reversed(groups):
            group.close(drain)
        mismatch = self._take_leave(groups, told)
        if self._trouble is not None:
            self.dump_if_asked()
        lost = len(self.membership.lost)
        self.registry.clear()
        self._stalls.close()
        self.seen.close()
        self._watcher.close()
        self.hearing.close()
        count_out(self.store, self.membership.launched, lost, linger)
        self.runtime.close()
        for closer in reversed(self._closers):
            closer()
        self.store.close()
        if mismatch is not None:
            raise mismatch

    def _take_leave(self, groups: list[ProcessGroup], told: set[str]) -> DistError | None:
        found = chains(groups, self._joined)
        if say_goodbye(self.store, self.rank, found, groups, self.recorder) and self.size > 1:
            self.hearing.gone.wait(LEAVE_SECONDS)
        left = self.membership.departures
        return find_mismatch(self.store, groups, found, left, self.recorder, told)
