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
    """The states of a group, in the only order in which it takes them."""

    USABLE = 0
    BROKEN = 1
    """An error ended it: every call raises that."""
    DESTROYED = 2
    """The program closed it, or the World did."""


class GroupState:
    """The state of the group of ``members``: its error, the members that left, its communicators.

    ``base``: the state of the group that this one was derived from. A thread holds ``lock`` to
    change anything here, or not to miss a change. The lock knows its thread: a signal may come
    while the thread has it, and the handler may make a call.
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
        """The ranks that have left the job in good order: members, and others."""
        self.absent: tuple[int, ...] = ()
        """The places of members that have left, made no call on the group, and never will."""
        self.refused: dict[int, Refused] = {}
        """By number: other members' refusals of calls that this rank has not reached."""
        self.order: CallOrder = Order()
        """The number of the last collective, and the hash of all."""
        self.fast_path: FastPath | None = None
        """Makes usual small calls by itself, once the members have met, while all is usual."""
        self.retired: bool = False
        """True if the group was destroyed, or this rank's program was told that it broke, or a
        derived group.

        Then the next mesh of these ranks gets another group. Told, not merely broken: that is at
        the same place of the program on every member, whenever each came to know of it.
        """
        self.communicators: dict[str, Communicator] = {}
        """By the device whose arrays they carry."""
        self.in_jit: Any = None
        """What ``meshlib.jit`` keeps with the group; it is closed before the group."""
        self.windows: Closable | None = None
        """What carries windows by messages, closed with the communicators."""
        self._base = base
        self._users_store: Store | None = None
        self._changed = Condition(self.lock)
        self._making = threading.RLock()

    # ------------------------------------------------------------------ phases

    @property
    def usable(self) -> bool:
        """True if calls can be made on it: it is neither broken nor closed."""
        return self.lifecycle is Lifecycle.USABLE

    @property
    def destroyed(self) -> bool:
        """True if it was closed."""
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

        The caller holds ``lock``. ``error`` is the error that broke the group. The first one stays,
        even if it comes after the group was closed.
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
        """Have the next mesh of these ranks get another group; so for the group's base."""
        self.retired = True
        if self._base is not None:
            self._base.retire()

    def end_in_a_fork(self, error: DistError) -> None:
        """Have every call in this fork of the rank's process raise ``error``."""
        # Threads that are not here may have held them.
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
        """Return the communicator for arrays on ``device``, making it if there is none yet.

        A member joins its group once, from whichever thread.
        """
        communicator = self.communicators.get(device)
        if communicator is not None:
            return communicator
        # Calls with several peers are the first at the same time.
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
        """True if the calling thread is in the middle of making a communicator."""
        return is_held(self._making)

    def open_communicators(self) -> list[Communicator]:
        """Return the communicators that can still carry a message. With ``lock``."""
        return [] if self.destroyed else list(self.communicators.values())

    def lose(self, communicators: list[Communicator], departed: Iterable[int]) -> None:
        """Tell ``communicators`` of the members among the ranks ``departed``, which have left."""
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
        """True if a message is on its way."""
        return any(communicator.receiving for communicator in self.communicators.values())

    def release(self) -> None:
        """Release the communicators; with none left, later ones are made anew."""
        with self.lock:
            communicators, self.communicators = self.communicators, {}
        self._close_windows()
        for communicator in communicators.values():
            communicator.close()

    def close(self, *, idle: bool) -> None:
        """Release the communicators for good; unless ``idle``, a call is still under way."""
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
