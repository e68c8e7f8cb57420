"""``JobMembership``: who this rank is, who else is there, and its place among them.

A rank's *identity* is its global rank: given once, to one process, and never to another one. Its
*place* is where it stands among the members of the present *epoch*. An epoch begins when the job
does, and whenever the members have agreed (``meshlib.job.continuing.agreement``) that others are to
go on: some are lost, some have come. Groups, meshes and messages name identities, so that what was
said of a rank stays true of it; a rank that comes in the place of another has an identity of its
own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from meshlib.events.events import Departures
from transport.errors import DistError


@dataclass(frozen=True, slots=True)
class Epoch:
    """``members`` are the identities of its ranks, by place; ``number`` counts from 0."""

    number: int
    members: Sequence[int]

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)


class JobMembership:
    """What one rank knows of the job's members. Any thread.

    ``size`` ranks, with the identities 0 to ``size`` - 1, begin the job together. ``joining``:
    ``rank`` comes later, and is the only member of an epoch of its own until it gets a place.
    """

    def __init__(self, rank: int, size: int, *, joining: bool = False) -> None:
        self.rank = rank
        self.joining: bool = joining
        self.launched = size
        """How many ranks began the job together."""
        self.epoch: Epoch = Epoch(0, (rank,) if joining else range(size))
        self.known: int = max(rank + 1, size)
        """All identities that this rank knows of are below this number."""
        self._news = threading.Condition()
        self._lost: dict[int, DistError] = {}
        self.left: frozenset[int] = frozenset()
        """The ranks that have left in good order."""
        self.departures: tuple[Departures, ...] = ()
        """How they left, and how far their calls had come."""
        self._waiting: dict[int, None] = {}
        self._agreed: dict[str, str] = {}
        self._epochs: dict[int, tuple[int, ...]] = {}

    # ------------------------------------------------------------------ asked

    @property
    def place(self) -> int:
        """This rank's place in the present epoch, -1 if it has none."""
        members = self.epoch.members
        return members.index(self.rank) if self.rank in members else -1

    @property
    def whole(self) -> Sequence[int]:
        """The ranks that a mesh over the whole job is over: a range, where they are all from 0 on.

        A rank that has come later is told of those that the others began with.
        """
        members = self.epoch.members
        if self.joining or isinstance(members, range):
            return range(self.launched)
        from_0 = range(len(members))
        return from_0 if tuple(members) == tuple(from_0) else members

    @property
    def lost(self) -> Mapping[int, DistError]:
        """The ranks that are gone, and what the groups that they were members of broke with."""
        with self._news:
            return dict(self._lost)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that are there and wait for a place, in the order in which they came."""
        with self._news:
            gone = self._lost.keys() | self.left | set(self.epoch.members)
            return tuple(rank for rank in self._waiting if rank not in gone)

    def failure_of(self, ranks: Collection[int]) -> DistError | None:
        """Return the loss of the first of ``ranks`` that is gone."""
        with self._news:
            return next((error for rank, error in self._lost.items() if rank in ranks), None)

    def agreed(self, name: str) -> str | None:
        """Return what was agreed on under ``name``, None if nothing is known of it."""
        with self._news:
            return self._agreed.get(name)

    def is_left_out(self, name: str, text: str) -> bool:
        """Whether the agreement ``name`` makes an epoch after the present one without this rank."""
        number = epoch_number(name)
        if number is None or number <= self.epoch.number or self.joining:
            return False
        return text != "null" and self.rank not in json.loads(text)["members"]

    @property
    def latest(self) -> int:
        """The number of the last epoch that was agreed on, whoever its members are."""
        with self._news:
            return max(self._epochs, default=0)

    def call(self) -> tuple[int, str] | None:
        """Return the number of the last epoch that was agreed on, and what was; None unless it is
        after the present one and has this rank as a member.
        """
        with self._news:
            number = max(self._epochs, default=0)
            if number <= self.epoch.number or self.rank not in self._epochs[number]:
                return None
            return number, self._agreed[epoch_name(number)]

    @property
    def deserted(self) -> bool:
        """Whether none of the members of the last epoch that was agreed on is there any more."""
        return all(rank in self._lost or rank in self.left for rank in self._last_members())

    @property
    def bereft(self) -> bool:
        """Whether all of those members are lost."""
        return all(rank in self._lost for rank in self._last_members())

    def _last_members(self) -> Sequence[int]:
        with self._news:
            number = max(self._epochs, default=0)
            return self._epochs.get(number, range(self.launched))

    def wait_for_news(self, due: Callable[[], object], timeout: float) -> bool:
        """Return whether ``due()`` is true, waiting for that up to ``timeout`` seconds.

        It is asked whenever something was noted here.
        """
        with self._news:
            return bool(self._news.wait_for(due, timeout))

    # ------------------------------------------------------------------ told

    def note_lost(self, rank: int, error: DistError) -> None:
        """Note that ``rank`` is gone: ``error`` says how. What was said first stays."""
        with self._news:
            self._lost.setdefault(rank, error)
            self._news.notify_all()

    def note_departures(self, departures: Departures) -> None:
        """Note that ranks have left in good order."""
        with self._news:
            self.departures = (*self.departures, departures)
            self.left |= departures.ranks
            self._news.notify_all()

    def note_waiting(self, rank: int) -> None:
        """Note that ``rank`` waits for a place."""
        with self._news:
            self._waiting[rank] = None
            self.known = max(self.known, rank + 1)
            self._news.notify_all()

    def note_agreed(self, name: str, text: str) -> None:
        """Note what members have agreed on."""
        number = epoch_number(name)
        with self._news:
            if number is not None and text != "null":
                self._epochs[number] = tuple(json.loads(text)["members"])
            self._agreed[name] = text
            self._news.notify_all()

    def begin(self, epoch: Epoch, *, joining: bool = False) -> None:
        """Make ``epoch`` the present one; ``joining``: of this rank alone, which has no place."""
        with self._news:
            self.epoch = epoch
            self.joining = joining
            self.known = max(self.known, *(rank + 1 for rank in epoch.members))
            for rank in epoch.members:
                self._waiting.pop(rank, None)
            self._news.notify_all()

    def end_in_a_fork(self) -> None:
        """Be usable in a fork of this rank's process."""
        self._news = threading.Condition()  # threads that are not here may have held it


_EPOCH = "epoch/"


def epoch_name(number: int) -> str:
    """Return the name of the agreement that makes the epoch ``number``."""
    return f"{_EPOCH}{number}"


def epoch_number(name: str) -> int | None:
    """Return which epoch the agreement ``name`` makes, None if it is about something else."""
    return int(name.removeprefix(_EPOCH)) if name.startswith(_EPOCH) else None


def without(members: Sequence[int], excluded: Collection[int]) -> tuple[int, ...]:
    """Return ``members``, in their order, that are not ``excluded``."""
    return tuple(rank for rank in members if rank not in excluded)
