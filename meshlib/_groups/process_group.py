"""``ProcessGroup``: a set of ranks, and what they do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from meshlib._calls.call_queue import CallQueue
from meshlib._calls.context import Observer, RankContext
from meshlib._calls.failures.failure import Failure
from meshlib._calls.fast_path import FastPath
from meshlib._calls.members import Members
from meshlib._calls.spec import CallSpec
from meshlib._calls.state import GroupState, Lifecycle
from meshlib._collectives.collectives import Collectives
from meshlib._events.events import Departures
from transport._communicators.base import Communicator
from transport._deadline import Timeout
from transport._errors import DistBackendError, DistError
from transport._operands.compression import Compression
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore

DRAIN_SECONDS = 5.0


def _make_no_companion(base: ProcessGroup, purpose: str, desc: str) -> ProcessGroup:
    raise ValueError(f"rank {base.global_rank} is no member of {base}")


class ProcessGroup(Collectives):
    """A set of ranks, and what they do together.

    Made by ``new_group``, by a mesh, or by ``init_process_group``; never directly. On a rank that
    is no member, ``rank()`` is -1 and every call returns None.

    Composed of: ``Members`` (who), ``GroupState`` (what became of it, and what carries its calls),
    ``Failure`` (how it breaks), ``CallQueue`` (the way into each call).
    """

    def __init__(
        self,
        context: RankContext,
        members: Members,
        base: ProcessGroup | None = None,
        make_companion: Callable[[ProcessGroup, str, str], ProcessGroup] = _make_no_companion,
    ) -> None:
        self.context = context
        self.members = members
        self.id: str = members.id
        self.ranks: tuple[int, ...] = members.ranks
        """The members' global ranks; the position is the rank in the group."""
        self.global_rank: int = members.global_rank
        self.backends: dict[str, str] = members.backends
        self.owner: threading.Thread | None = None
        """The thread whose calls these are, where only one can make them (inside ``jax.jit``)."""
        self.program_calls: Any = None
        """Makes its calls inside ``jax.jit`` without the interpreter (``meshlib.jit._direct``)."""
        self.under_way: dict[int, Any] = {}
        """Calls inside ``jax.jit`` that were begun by one place of a program and end at another."""
        self.state: GroupState = GroupState(context, members, None if base is None else base.state)
        """What has become of the group."""
        self._failure = Failure(self.state)
        self.call_queue: CallQueue = CallQueue(self.state, self._failure)
        self._make_companion = make_companion
        self._adding = threading.Lock()  # a companion or the store
        self._companions: dict[str, ProcessGroup] = {}
        self._users_store: Store | None = None

    # ------------------------------------------------------------------ who

    @property
    def process_group(self) -> ProcessGroup:
        """The group itself."""
        return self

    def rank(self) -> int:
        """Return this rank's place in the group, -1 if it is no member."""
        return self.members.rank()

    def size(self) -> int:
        """Return the number of members, -1 on a rank that is none."""
        return self.members.size()

    def name(self) -> str:
        """Return the default backend's name, as c10d does."""
        return self.members.name()

    @property
    def backend(self) -> str:
        """The backends by device: ``cpu:tcp``, or ``cpu:tcp,cuda:nccl``."""
        return self.members.backend

    @property
    def compression(self) -> Compression | None:
        """How large sums and averages travel between hosts; None: as they are. A mesh says it."""
        return self.members.compression

    @property
    def group_desc(self) -> str:
        """What the group is for, as messages name it; a library above may set it."""
        return self.members.group_desc

    @group_desc.setter
    def group_desc(self, group_desc: str) -> None:
        self.members.group_desc = group_desc

    @property
    def group_name(self) -> str:
        """The id of the group, unique in the job."""
        return self.id

    @property
    def seconds(self) -> float:
        """The deadline of calls that bring none of their own, in seconds."""
        return self.members.seconds

    @property
    def timeout(self) -> timedelta:
        """The deadline of calls that bring none of their own."""
        return timedelta(seconds=self.members.seconds)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the deadline of calls that bring none of their own: seconds or a timedelta.

        Raises ValueError for a negative one, TypeError for what is no number.
        """
        self.members.set_timeout(timeout)

    def group_rank(self, global_rank: int) -> int:
        """Return the place of ``global_rank`` in the group; raise ValueError for a stranger."""
        return self.members.group_rank(global_rank)

    def get_group_store(self) -> Store:
        """Return this group's own part of the job's store, for the user's keys.

        Waits on it end when the group breaks: with ``RankFailedError`` when a member is lost.
        Raises ValueError on a rank that is no member, and after the group was destroyed.
        """
        if self.rank() < 0:
            raise ValueError(f"rank {self.global_rank} is no member of {self}")
        with self._adding:
            store = self._users_store
            if store is None:
                store = PrefixStore(f"users/{self.id}", self.context.store.clone())
                self._users_store = store
                self.on_failure(store.end_waits)
        if self.state.destroyed:
            store.close()
            raise self.state.unusable()
        return store

    def __repr__(self) -> str:
        return repr(self.members)

    # ------------------------------------------------------------------ calls

    def issue(self, spec: CallSpec, async_op: bool = False, timeout: Timeout | None = None) -> Any:
        """Make one call; see ``CallQueue.issue``."""
        return self.call_queue.issue(spec, async_op, timeout)

    @contextmanager
    def observed(self, observer: Observer) -> Generator[None]:
        """Call ``observer(members, header, device, run)`` before each collective, in this context.

        Before each that this rank issues, on this group or any other, whose ``members`` it gets.
        The header has no sequence number yet. What it returns is run in the place of ``run``:
        itself, or something around it. The observer may make collectives itself (and is then called
        for them, too). Raises RuntimeError if somebody observes on behalf of this group already.
        """
        observers = self.context.observers
        if self.id in observers:
            raise RuntimeError(f"the calls of {self} are observed already; only one can do so")
        observers[self.id] = observer
        try:
            yield
        finally:
            del observers[self.id]

    def reached(self) -> int:
        """Return the number of the last collective that this rank issued."""
        return self.state.order.sequence

    def chain(self) -> tuple[int, int]:
        """Return the number of the last collective that this rank issued, and the hash of all."""
        return self.state.order.sequence, self.state.order.history

    @property
    def fast_path(self) -> FastPath | None:
        """What makes usual small calls in compiled code, once the members have met."""
        return self.state.fast_path

    def has_communicator(self, device: str) -> bool:
        """Whether the communicator for arrays on ``device`` was made already."""
        return device in self.state.communicators

    def communicator(self, device: str) -> Communicator:
        """Return the communicator for arrays on ``device``, making it if there is none yet.

        Only ``issue`` makes calls on it.
        """
        return self.state.communicator(device)

    # ------------------------------------------------------------------ groups beside it

    def companion(self, purpose: str, desc: str = "") -> ProcessGroup:
        """Return the group of the same ranks for calls of ``purpose``, counted apart.

        For callers whose calls come in an order of their own, such as those inside ``jax.jit``. It
        is this group's alone, with its backends and deadline, closed and aborted with it; its
        failures are its own. Costs no message. ``desc`` is how messages call it. Raises ValueError
        after the group was destroyed.
        """
        with self._adding:
            if self.state.destroyed:
                raise ValueError(f"{self} was destroyed; make a new one")
            found = self._companions.get(purpose)
            if found is None:
                found = self._companions[purpose] = self._make_companion(self, purpose, desc)
        found.set_timeout(self.members.seconds)
        return found

    def companions(self) -> list[ProcessGroup]:
        """Return the companions that were made, and theirs."""
        own = list(self._companions.values())
        return own + [other for one in own for other in one.companions()]

    @property
    def retired(self) -> bool:
        """Whether the next mesh of these ranks gets another group: see ``GroupState.retired``."""
        return self.state.retired

    # ------------------------------------------------------------------ failure

    @property
    def destroyed(self) -> bool:
        """Whether the group was closed, by ``destroy_process_group`` or with the World."""
        return self.state.destroyed

    def await_failure(self, timeout: float) -> DistError | None:
        """Return a copy of the error that broke the group, waiting up to ``timeout`` seconds."""
        return self.state.await_failure(timeout)

    def fail(self, error: DistError) -> None:
        """Break the group: calls under way and later calls raise ``error``."""
        self._failure.fail(error)

    def on_failure(self, told: Callable[[DistError], object]) -> None:
        """Call ``told(error)`` when the group breaks, or now if it has, in whichever thread.

        It must return soon, and may be called again.
        """
        self.state.failure_listeners.append(told)
        if (error := self.state.await_failure(0)) is not None:
            told(error)

    def abort(self, reason: str) -> None:
        """Break the group on all members: they raise ``DistBackendError`` with ``reason``.

        For a rank that cannot make the calls for which the others wait. Calls inside ``jax.jit``
        end, too. Idempotent.
        """
        for group in (self, *self.companions()):
            message = f"{group} was aborted by rank {self.global_rank}: {reason}"
            group._failure.fail_everywhere(DistBackendError(message))
            group._failure.note_told()

    def do_without(self, left: Departures) -> None:
        """Note that ranks have left the job.

        If a member made none on this one, calls that need it raise ``RankFailedError``, those
        under way too; others go on. If it did, its channels tell who needs it. What it sent is
        still received.
        """
        self._failure.do_without(left)

    # ------------------------------------------------------------------ the end

    def release(self) -> None:
        """Let go of the communicators if the group is broken and no call is under way on them."""
        state = self.state
        if state.lifecycle is Lifecycle.BROKEN and self.call_queue.streams.is_idle():
            state.release()

    def close(self, drain: float = DRAIN_SECONDS) -> None:
        """Let calls that were issued end (at most ``drain`` seconds), then let go of everything."""
        state = self.state
        if state.destroyed:
            return
        if self.program_calls is not None:
            self.program_calls.close(0 if state.error is not None else drain)
        idle = self.call_queue.drain(0 if state.error is not None else drain)
        with state.lock:
            state.advance(Lifecycle.DESTROYED)
            state.retired = True
        if self._users_store is not None:
            self._users_store.close()
        state.close(idle=idle)
        self.call_queue.streams.join()

    def leave_behind(self, error: DistError) -> None:
        """Let go of the group in a fork of this rank's process: every call raises ``error``.

        The other members, and this one in its own process, are not to notice anything.
        """
        self._adding = threading.Lock()  # threads that are not here may have held it
        self.state.end_in_a_fork(error)
