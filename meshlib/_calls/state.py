"""``GroupState``: whether a group is usable, broken or destroyed, and its communicators."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

from meshlib._calls.context import RankContext
from meshlib._calls.fast_path import CallOrder, FastPath, Order
from meshlib._calls.members import Members
from meshlib._events.events import Departures, Refused
from transport._communicators.base import Communicator
from transport._errors import DistError
from transport._net.fork import Closable
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore
from transport._waiting.interrupts import Condition, is_held


class Lifecycle(enum.IntEnum):
    """The states of a group, in their only possible order."""

    USABLE = 0
    BROKEN = 1
    """An error broke it; every call raises that error."""
    DESTROYED = 2
    """The program or the World closed it."""


class GroupState:
    """The state of the group of ``members``: its error, the members that left, its communicators.

    ``base`` is the state of a derived group's parent. A thread holds ``lock`` to change the state,
    or to wait for a change. The lock is reentrant, because a signal handler may make a call while
    its thread holds it.
    """

    def __init__(
        self, context: RankContext, members: Members, base: GroupState | None = None
    ) -> None:
        self.context: RankContext = context
        self.members: Members = members
        self.lock: threading.RLock = threading.RLock()  # pyright: ignore[reportInvalidTypeForm]
        self.lifecycle: Lifecycle = Lifecycle.USABLE
        self.error: DistError | None = None
        """The error that broke the group. Copies are raised: each thread adds its traceback."""
        self.failure_listeners: list[Callable[[DistError], object]] = []
        """Called with the error whenever the group is reported broken."""
        self.departures: tuple[Departures, ...] = ()
        """The ranks that have left the job in good order, members or not."""
        self.absent: tuple[int, ...] = ()
        """The group ranks of members that left the job without a call on the group."""
        self.refused: dict[int, Refused] = {}
        """Other members' refusals of calls that this rank has not reached, by call number."""
        self.order: CallOrder = Order()
        """The number of the last collective, and the hash of all collectives."""
        self.fast_path: FastPath | None = None
        """Makes common small calls, once the members have met and while the group is ``usual``."""
        self.retired: bool = False
        """True if the group was destroyed or the program got its error, or a derived group's.

        Then the next mesh of these ranks gets a new group. A broken group alone does not count:
        ranks notice a failure at different times, but their programs get the error at the same
        place.
        """
        self.communicators: dict[str, Communicator] = {}
        """The communicators, by the device of their arrays."""
        self.in_jit: Any = None
        """The state of ``meshlib.jit`` for the group; it is closed before the group."""
        self.windows: Closable | None = None
        """The service for windows on other hosts, closed with the communicators."""
        self._base = base
        self._users_store: Store | None = None
        self._changed = Condition(self.lock)
        self._making = threading.RLock()

    # ------------------------------------------------------------------ phases

    @property
    def usable(self) -> bool:
        """True if the group accepts calls: it is neither broken nor closed."""
        return self.lifecycle is Lifecycle.USABLE

    @property
    def destroyed(self) -> bool:
        """True if the group was closed."""
        return self.lifecycle is Lifecycle.DESTROYED

    @property
    def usual(self) -> bool:
        """True if calls need not check for failed members."""
        return self.usable and not self.absent and not self.refused

    @property
    def departed(self) -> tuple[int, ...]:
        """The global ranks of members that have left the job in good order."""
        left: set[int] = set().union(*(departures.ranks for departures in self.departures))
        return tuple(rank for rank in self.members.ranks if rank in left)

    def advance(self, to: Lifecycle, error: DistError | None = None) -> bool:
        """Advance to the phase ``to``, never back; return whether the phase or the error changed.

        The caller holds ``lock``. ``error`` is the error that broke the group. The first error
        stays, even if it comes after the group was closed.
        """
        changed = to > self.lifecycle or (error is not None and self.error is None)
        self.lifecycle = max(to, self.lifecycle)
        if self.error is None:
            self.error = error
        self.fast_path = None
        self._changed.notify_all()
        return changed

    def await_failure(self, timeout: float) -> DistError | None:
        """Return a copy of the error that broke the group, waiting up to ``timeout`` seconds."""
        if self.error is None and timeout > 0:
            with self.lock:
                self._changed.wait_for(lambda: self.error is not None, timeout)
        return None if self.error is None else copy(self.error)

    def on_failure(self, listener: Callable[[DistError], object]) -> None:
        """Call ``listener(error)`` when the group breaks, or now if it has, in any thread.

        The listener must return soon, and may be called again.
        """
        self.failure_listeners.append(listener)
        if (error := self.await_failure(0)) is not None:
            listener(error)

    def unusable(self) -> Exception:
        """Return the error of calls on this group."""
        if self.error is not None:
            return copy(self.error)
        return ValueError(f"{self.members} was destroyed; make a new one")

    def retire(self) -> None:
        """Give the next mesh of these ranks a new group; the same for the base."""
        self.retired = True
        if self._base is not None:
            self._base.retire()

    def end_in_a_fork(self, error: DistError) -> None:
        """Make every call in this fork of the rank's process raise ``error``."""
        # Threads that the fork does not have may have held the locks.
        self.lock = threading.RLock()
        self._changed = Condition(self.lock)
        self._making = threading.RLock()
        self.error = None
        with self.lock:
            self.advance(Lifecycle.DESTROYED, error)

    def users_store(self) -> Store:
        """Return the group's own part of the job's store; its waits end when the group breaks.

        Raises ValueError after the group was destroyed.
        """
        if self._users_store is None:
            store = PrefixStore(f"users/{self.members.id}", self.context.store.clone())
            with self.lock:
                if self._users_store is None:
                    self._users_store = store
            if self._users_store is store:
                self.on_failure(store.end_waits)
            else:
                store.close()
        if self.destroyed:
            self._users_store.close()
            raise self.unusable()
        return self._users_store

    # ------------------------------------------------------------------ communicators

    def communicator(self, device: str) -> Communicator:
        """Return the communicator for arrays on ``device``, created on first use.

        All threads of this rank share it.
        """
        communicator = self.communicators.get(device)
        if communicator is not None:
            return communicator
        # The first calls with several peers may run at the same time.
        with self._making:
            communicator = self.communicators.get(device)
            if communicator is None:
                communicator = self.context.make_communicator(self.members, device)
                with self.lock:
                    self.communicators[device] = communicator
                    failure, departed = self.error, self.departed
                self.lose([communicator], departed)
                if failure is not None:
                    communicator.abort(str(failure))
            return communicator

    def is_making(self) -> bool:
        """True if the calling thread is creating a communicator."""
        return is_held(self._making)

    def open_communicators(self) -> list[Communicator]:
        """Return the communicators that can still send. The caller holds ``lock``."""
        return [] if self.destroyed else list(self.communicators.values())

    def lose(self, communicators: list[Communicator], departed: Iterable[int]) -> None:
        """Mark the members among the ``departed`` ranks as lost in ``communicators``."""
        if not communicators:
            return
        members = self.members
        places = members.places_of(departed)
        for communicator in communicators:
            known = communicator.lost
            for place in places:
                if place not in known:
                    communicator.lose(place, f"rank {members.ranks[place]} has left the job")

    def is_receiving(self) -> bool:
        """True if a message is arriving."""
        return any(communicator.receiving for communicator in self.communicators.values())

    def release(self) -> None:
        """Release the communicators; later calls create new ones."""
        with self.lock:
            communicators, self.communicators = self.communicators, {}
        self._close_windows()
        for communicator in communicators.values():
            communicator.close()

    def close(self, *, idle: bool) -> None:
        """Release the communicators for good; abort them first unless the group is ``idle``."""
        if self._users_store is not None:
            self._users_store.close()
        self._close_windows()
        for communicator in list(self.communicators.values()):
            for text in communicator.left_over() if self.error is None else ():
                self.context.log.warning("%s ends with messages left: %s", self.members, text)
            if not idle:
                communicator.abort("the group was destroyed")
            communicator.close()

    def _close_windows(self) -> None:
        windows, self.windows = self.windows, None
        if windows is not None:
            windows.close()
