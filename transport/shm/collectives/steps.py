"""A plan: what one member does in a collective through the board, as a list of simple steps.

Python makes it, once for a kind of call, a root and a group; two interpreters run it: that of the
compiled core, and NumPy's beside this (``interpreter``). A plan says nothing of sizes: those are
the arrays', and so one plan serves all of them, and a group has few.

Arrays are cut into *laps*, of which one after the other goes through the members' blocks. A lap of
an array is a stretch of it; a block has room for a lap of one array, or for one for each peer: its
*shares*. Where all whose data a member reads have it in a place that others can read, nothing goes
through the blocks, and laps are longer: ``WIDE`` bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

ALL = -1
"""Instead of a peer: all others. Instead of the array that is reduced into: each member's own."""

NOTHING = -1
"""Instead of an array: there is none."""

WIDE = 64 << 20
"""The bytes of a lap that no block has to hold. After each, signals are handled."""


class Op(IntEnum):
    """What a step does. ``lap`` is the turn of the loop it is in (0 outside) plus ``Step.lap``; a
    step whose lap the call does not have is left out. Numbers are those of ``native/shm/plans.h``.
    """

    NOTE = 0
    """Write on this member's card what it sends and where that lies."""
    STAGE = 1
    """Write a lap of the parts' arrays into its own block; nothing where they are read in place."""
    PUBLISH = 2
    """Show that it has come to the step ``lap + number``."""
    KEEP = 3
    """Copy the first part's array into the second's: what needs no other member."""
    MEET = 4
    """Wait until the peer has begun the call, and compare cards."""
    SURVEY = 5
    """Read what the members whose data it reads have noted: compare sizes, agree on the laps."""
    LOOP = 6
    """Begin the turns from ``number`` on: one for each lap, and ``lap`` more."""
    END = 7
    """End a turn; go back to LOOP for the next one."""
    REACH = 8
    """Wait until the peer has come to the step ``lap + number``."""
    TAKE = 9
    """Copy a lap of what the parts' peers have into the parts' arrays."""
    FOLD = 10
    """Reduce a lap of what all members have, one part each, into the array ``number``, or with ALL
    into where each has its own.
    """
    CHECK_LATER = 11
    """Have the cards of those it did not meet compared in a later call."""
    CLOSE = 12
    """Show that it reads no other's data any more, where there were laps enough to need that."""
    AWAIT = 13
    """Where its data is read in place: wait until the peer has closed the call."""


class Cut(IntEnum):
    """Which piece of a lap: members' shares of it are equal, of whole cache lines."""

    WHOLE = 0
    BEFORE = 1
    """What comes before this member's share."""
    OWN = 2
    AFTER = 3


class Part(NamedTuple):
    """An array of the call by number, and where it is, or goes: share ``share`` of a block.

    ``peer`` is whose block that is, or whose data; it is this member for its own array.
    """

    peer: int
    array: int
    share: int = 0
    cut: Cut = Cut.WHOLE


class Step(NamedTuple):
    """One step; ``Op`` says what its numbers mean."""

    op: Op
    lap: int = 0
    peer: int = ALL
    number: int = 0
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one member of a group does in calls of one kind with one root.

    ``arrays`` is how many they have, of which the first ``read_only`` are not written.
    ``sends`` and ``expects`` are by member: the array that goes to it, and the one that is as large
    as what comes from it. ``capacity`` is the bytes of a lap, at most; ``spread``: laps are as even
    as they can be. ``known``: all members know all sizes before they meet. Data is read in place
    from ``places_from`` laps on. ``alone``: whoever reads is the only one who does anything.
    """

    steps: tuple[Step, ...]
    arrays: int
    read_only: int
    sends: tuple[int, ...]
    expects: tuple[int, ...]
    capacity: int
    spread: bool = False
    known: bool = False
    places_from: int = 2
    wide: int = WIDE
    alone: bool = False
    sources: tuple[int, ...] = field(init=False)
    """The arrays that are sent."""
    sized: tuple[int, ...] = field(init=False)
    """The arrays that say how many laps there are."""
    loop: int = field(init=False)
    """The step that begins the loop; there is one."""
    end: int = field(init=False)
    """The step that ends it."""

    def __post_init__(self) -> None:
        sources = {array for array in self.sends if array != NOTHING}
        object.__setattr__(self, "sources", tuple(sorted(sources)))
        sized = sources | {array for array in self.expects if array != NOTHING}
        object.__setattr__(self, "sized", tuple(sorted(sized)))
        ops = [step.op for step in self.steps]
        object.__setattr__(self, "loop", ops.index(Op.LOOP))
        object.__setattr__(self, "end", ops.index(Op.END))

    def packed(self) -> bytes:
        """Return the plan as the compiled core reads it: numbers of 32 bits."""
        parts = [part for step in self.steps for part in step.parts]
        head = (
            *(len(self.steps), len(parts), self.arrays, self.read_only),
            *(self.capacity, self.wide, self.places_from, self.spread, self.known),
        )
        steps: list[int] = []
        first = 0
        for op, lap, peer, number, own in self.steps:
            steps += (op, lap, peer, number, first, len(own))
            first += len(own)
        numbers = (*head, *self.sends, *self.expects, *steps, *chain.from_iterable(parts))
        return struct.pack(f"={len(numbers)}i", *numbers)
