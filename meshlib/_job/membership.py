"""``JobMembership``: the members of the job, and this rank's place among them.

A rank's *identity* is its global rank; it is assigned to one process and never reused. Its *place*
is its index among the members of the present *epoch*. The first epoch begins with the job, a new
one whenever the members agree (``meshlib._job.continuing.agreement``) on new members. Groups,
meshes and messages use identities, which stay valid in later epochs. A replacement rank gets a new
identity.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from meshlib._events.events import Departures
from transport._errors import DistError
from transport._waiting.interrupts import Condition


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch: its ``number``, from 0, and the identities of its ``members``, by place."""

    number: int
    members: Sequence[int]

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)


class JobMembership:
    """The members of the job, as known to ``rank``. Thread-safe.

    ``size`` ranks, with the identities 0 to ``size`` - 1, begin the job together. ``joining``:
    ``rank`` arrives later. Until it gets a place, it is the only member of a separate epoch.
    ``alone``: the other ranks have places, but count as gone from the start.
    """

    def __init__(self, rank: int, size: int, *, joining: bool = False, alone: bool = False) -> None:
        self.rank = rank
        self.joining: bool = joining
        self.launched = size
        """The number of ranks that began the job together."""
        self.epoch: Epoch = Epoch(0, (rank,) if joining else range(size))
        self.known: int = max(rank + 1, size)
        """All known identities are below this number."""
        self._changed = Condition()
        self._lost: dict[int, DistError] = {}
        self.left: frozenset[int] = frozenset(set(range(size)) - {rank} if alone else ())
        """The ranks that have left in good order."""
        self.departures: tuple[Departures, ...] = ()
        """The events of ranks that left, with the last calls of each."""
        self._waiting: dict[int, None] = {}
        self._agreed: dict[str, str] = {}
        self._epochs: dict[int, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ state

    @property
    def place(self) -> int:
        """This rank's place in the present epoch, or -1 if it has none."""
        members = self.epoch.members
        return members.index(self.rank) if self.rank in members else -1

    @property
    def whole(self) -> Sequence[int]:
        """The ranks of a mesh over the whole job: a range if they are all ranks from 0 on.

        On a rank that arrived later: the ranks that began the job.
        """
        members = self.epoch.members
        if self.joining or isinstance(members, range):
            return range(self.launched)
        from_0 = range(len(members))
        return from_0 if tuple(members) == tuple(from_0) else members

    @property
    def lost(self) -> Mapping[int, DistError]:
        """The lost ranks, with the errors that broke their groups."""
        with self._changed:
            return dict(self._lost)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait for a place, in the order of their arrival."""
        with self._changed:
            gone = self._lost.keys() | self.left | set(self.epoch.members)
            return tuple(rank for rank in self._waiting if rank not in gone)

    def failure_of(self, ranks: Collection[int]) -> DistError | None:
        """Return the error of the first lost rank in ``ranks``, or None."""
        with self._changed:
            return next((error for rank, error in self._lost.items() if rank in ranks), None)

    def agreed(self, name: str) -> str | None:
        """Return the result of the agreement ``name``, or None if there is none yet."""
        with self._changed:
            return self._agreed.get(name)

    def is_left_out(self, name: str, text: str) -> bool:
        """True if the agreement ``name`` begins a later epoch without this rank."""
        number = epoch_number(name)
        if number is None or number <= self.epoch.number or self.joining:
            return False
        return text != "null" and self.rank not in json.loads(text)["members"]

    @property
    def latest(self) -> int:
        """The number of the last agreed epoch, with or without this rank."""
        with self._changed:
            return max(self._epochs, default=0)

    def call(self) -> tuple[int, str] | None:
        """Return the number and the text of the last agreement on an epoch, or None.

        None unless that epoch is later than the present one and includes this rank.
        """
        with self._changed:
            number = max(self._epochs, default=0)
            if number <= self.epoch.number or self.rank not in self._epochs[number]:
                return None
            return number, self._agreed[epoch_name(number)]

    @property
    def all_gone(self) -> bool:
        """True if all members of the last agreed epoch are lost or have left."""
        return all(rank in self._lost or rank in self.left for rank in self._last_members())

    @property
    def all_lost(self) -> bool:
        """True if all members of the last agreed epoch are lost."""
        return all(rank in self._lost for rank in self._last_members())

    def _last_members(self) -> Sequence[int]:
        with self._changed:
            number = max(self._epochs, default=0)
            return self._epochs.get(number, range(self.launched))

    def wait_for_change(self, due: Callable[[], object], timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until ``due()`` is true; return whether it is.

        ``due`` is called again after each change of this object.
        """
        with self._changed:
            return bool(self._changed.wait_for(due, timeout))

    # ------------------------------------------------------------------ changes

    def note_lost(self, rank: int, error: DistError) -> None:
        """Record that ``rank`` is lost by ``error``. The first error stays."""
        with self._changed:
            self._lost.setdefault(rank, error)
            self._changed.notify_all()

    def note_departures(self, departures: Departures) -> None:
        """Record that ranks have left in good order."""
        with self._changed:
            self.departures = (*self.departures, departures)
            self.left |= departures.ranks
            self._changed.notify_all()

    def note_waiting(self, rank: int) -> None:
        """Record that ``rank`` waits for a place."""
        with self._changed:
            self._waiting[rank] = None
            self.known = max(self.known, rank + 1)
            self._changed.notify_all()

    def note_agreed(self, name: str, text: str) -> None:
        """Record the result of an agreement."""
        number = epoch_number(name)
        with self._changed:
            if number is not None and text != "null":
                self._epochs[number] = tuple(json.loads(text)["members"])
            self._agreed[name] = text
            self._changed.notify_all()

    def begin(self, epoch: Epoch, *, joining: bool = False) -> None:
        """Make ``epoch`` the present one. With ``joining``, this rank is alone, without a place."""
        with self._changed:
            self.epoch = epoch
            self.joining = joining
            self.known = max(self.known, *(rank + 1 for rank in epoch.members))
            for rank in epoch.members:
                self._waiting.pop(rank, None)
            self._changed.notify_all()

    def end_in_a_fork(self) -> None:
        """Make this usable in a fork of the rank's process."""
        self._changed = Condition()  # threads that the fork lacks may have held it


_EPOCH = "epoch/"


def epoch_name(number: int) -> str:
    """Return the name of the agreement on the epoch ``number``."""
    return f"{_EPOCH}{number}"


def epoch_number(name: str) -> int | None:
    """Return the number of the epoch of the agreement ``name``, or None for other agreements."""
    return int(name.removeprefix(_EPOCH)) if name.startswith(_EPOCH) else None


def without(members: Sequence[int], excluded: Collection[int]) -> tuple[int, ...]:
    """Return the ``members`` that are not ``excluded``, in order."""
    return tuple(rank for rank in members if rank not in excluded)
