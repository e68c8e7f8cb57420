"""One rank's work in each collective of a plan: pack, call, unpack.

The three steps are separate because they may run at different times. On the CPU, all of them run at
the call's turn. On a GPU the call only joins a stream, and the caller's thread packs and unpacks.

Over shared memory, the communicator itself reads and writes parts that are not contiguous. Other
communicators move them through buffers, in rounds of a few MiB. So no rank needs a second array's
memory for packing.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Protocol

import numpy as np

from meshlib.sharding._local import (
    Array,
    Box,
    array_module,
    flat_source,
    flat_target,
    intersection,
    relative,
    shape_of,
)
from meshlib.sharding._redistribution.steps import ALL_GATHER, PlanStep
from transport._calls.call import Call
from transport._communicators.base import Communicator
from transport._operands.reduce_op import Flat, ReduceOp

ROUND_BYTES = 4 << 20
"""The approximate bytes that a rank sends to all others in a round.

In smaller rounds, ranks would wait for each other more often, which costs more than caches save.
"""

MOST_MEMBERS_IN_ROUNDS = 64
"""Larger groups exchange all parts in one round, because most members are on other hosts."""


class StepCall(Protocol):
    """This rank's part in a collective, which may have several rounds."""

    elements: int
    """The call's number of elements, the same on all members (0: members differ)."""

    def prepare(self, local: Array, *, gaps: bool) -> int:
        """Accept this rank's array; return the number of rounds, the same on all members.

        It is 1 on a GPU, and if the communicator takes arrays with ``gaps``.
        """
        ...

    def pack(self, number: int) -> None:
        """Lay out the data to send in a round."""
        ...

    def call(self, communicator: Communicator, call: Call) -> None:
        """Make the call of the round."""
        ...

    def unpack(self, number: int) -> Array:
        """Copy a round's received data to its place; return this rank's array after the step."""
        ...


class MemberBoxes:
    """The parts of the global array that a step's members have before and after it."""

    def __init__(self, step: PlanStep, shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        mesh = step.source.mesh
        self.before: list[Box] = []
        self.after: list[Box] = []
        # A rank receives from the replicas that have its own coordinates.
        replicated = [i for i in step.source.replicated_dims if i in step.mesh_dims]
        self._copies: list[tuple[int, ...]] = []
        for rank in ranks:
            at = mesh.coordinate_of(rank)
            assert at is not None, "members of a mesh's group are in the mesh"
            self.before.append(step.source.slices_at(shape, at))
            self.after.append(step.target.slices_at(shape, at))
            self._copies.append(tuple(at[i] for i in replicated))
        self._is_gather = step.kind == ALL_GATHER
        self._rounds: dict[int, int] = {}

    def sent(self, sender: int, receiver: int) -> Box | None:
        """Return the part that ``sender`` sends to ``receiver`` (group ranks), or None."""
        if self._copies[sender] != self._copies[receiver]:
            return None
        return intersection(self.before[sender], self.after[receiver])

    def rounds(self, itemsize: int) -> int:
        """Return the number of rounds of an exchange: 1 if all parts are contiguous."""
        if itemsize not in self._rounds:
            self._rounds[itemsize] = self._count_rounds(itemsize)
        return self._rounds[itemsize]

    def _count_rounds(self, itemsize: int) -> int:
        size = len(self.before)
        if size > MOST_MEMBERS_IN_ROUNDS:
            return 1
        most, scattered = 1, False
        for sender in range(size):
            for receiver in range(size):
                box = self.sent(sender, receiver)
                if box is None or sender == receiver:
                    continue
                # A gather sends the sender's whole part.
                from_one = self._is_gather or _is_contiguous(box, self.before[sender])
                in_place = from_one and _is_contiguous(box, self.after[receiver])
                scattered = scattered or not in_place
                most = max(most, -(-(box[0].stop - box[0].start) // self.rows(box, itemsize)))
        return most if scattered else 1

    def rows(self, box: Box, itemsize: int) -> int:
        """Return the number of rows (along dim 0) of a message that travel in a round."""
        others = 1 if self._is_gather else max(len(self.before) - 1, 1)
        row = prod(shape_of(box)[1:]) * itemsize
        return max(ROUND_BYTES // others // max(row, 1), 1)


@lru_cache(maxsize=1024)
def members_of(step: PlanStep, shape: tuple[int, ...], ranks: tuple[int, ...]) -> MemberBoxes:
    """Return the ``MemberBoxes`` of a step whose group has the global ``ranks``, in that order."""
    return MemberBoxes(step, shape, ranks)


class ExchangeCall:
    """An all_to_all among the members, or an all_gather.

    The part that stays on this rank is copied once: by a communicator that takes gaps, else by
    ``prepare``.
    """

    def __init__(self, step: PlanStep, members: MemberBoxes, own: int) -> None:
        self._members, self._own = members, own
        self._is_gather = step.kind == ALL_GATHER
        self.elements: int = prod(shape_of(members.after[own])) if self._is_gather else 0

    def prepare(self, local: Array, *, gaps: bool) -> int:
        members, own = self._members, self._own
        module, peers = array_module(local), range(len(members.before))
        before, after = members.before[own], members.after[own]
        self._result = result = module.empty(shape_of(after), local.dtype)
        self._gaps = gaps
        kept = members.sent(own, own)
        if kept is not None and not gaps:
            result[relative(kept, after)] = local[relative(kept, before)]
        rounds = members.rounds(local.dtype.itemsize) if module is np and not gaps else 1
        nothing = module.empty(0, local.dtype)

        def message(box: Box | None, array: Array, within: Box) -> _PackedBox:
            if box is None:
                return _PackedBox(nothing, 0, gaps)
            rows = members.rows(box, local.dtype.itemsize) if rounds > 1 else 0
            return _PackedBox(array[relative(box, within)], rows, gaps)

        if self._is_gather:
            self._out = [message(before, local, before)]
        else:
            out = [None if p == own and not gaps else members.sent(own, p) for p in peers]
            self._out = [message(box, local, before) for box in out]
        received = [None if p == own and not gaps else members.sent(p, own) for p in peers]
        self._in = [message(box, result, after) for box in received]
        return rounds

    def pack(self, number: int) -> None:
        self._sources = [message.packed(number) for message in self._out]
        self._targets = [message.room(number) for message in self._in]
        if self._is_gather and not self._gaps:
            # ``prepare`` has filled this rank's own place, but the call needs a target for it.
            self._targets[self._own] = self._sources[0]

    def call(self, communicator: Communicator, call: Call) -> None:
        if self._is_gather:
            communicator.all_gather(call, self._targets, self._sources[0])
        else:
            communicator.all_to_all(call, self._targets, self._sources)

    def unpack(self, number: int) -> Array:
        for message in self._in:
            message.place()
        return self._result


class _PackedBox:
    """A message between two members: a part of an array, in rounds of ``rows`` (0: in one round).

    With ``gaps``, the communicator takes parts that are not contiguous.
    """

    __slots__ = ("_array", "_buffer", "_from_buffer", "_gaps", "_rows")

    def __init__(self, array: Array, rows: int, gaps: bool) -> None:
        self._array, self._rows, self._gaps = array, rows, gaps
        self._buffer: Array = None
        self._from_buffer: tuple[Array, Array] | None = None

    def packed(self, number: int) -> Flat:
        """Return the data to send in a round, contiguous unless ``gaps``."""
        part = self._of(number)
        if part.flags.c_contiguous:
            return _flat(part)
        if self._gaps and part.ndim > 1:
            return part
        room = self._room(part)
        room[...] = part
        return _flat(room)

    def room(self, number: int) -> Flat:
        """Return the memory for the data received in a round, contiguous unless ``gaps``."""
        part = self._of(number)
        self._from_buffer = None
        if part.flags.c_contiguous:
            return _flat(part)
        if self._gaps and part.ndim > 1:
            return part
        room = self._room(part)
        self._from_buffer = (part, room)
        return _flat(room)

    def place(self) -> None:
        """Copy the received data to its place, if ``room`` returned a buffer."""
        if self._from_buffer is not None:
            part, room = self._from_buffer
            part[...] = room

    def _of(self, number: int) -> Array:
        rows = self._rows
        return self._array[number * rows : (number + 1) * rows] if rows else self._array

    def _room(self, part: Array) -> Array:
        """Return a buffer of the shape of ``part``, reused in every round."""
        if self._buffer is None:  # the first round is the largest
            self._buffer = array_module(part).empty(part.size, part.dtype)
        return self._buffer[: part.size].reshape(part.shape)


class ReductionCall:
    """A reduction of the members' arrays: an all_reduce, or with ``scatter`` a reduce_scatter."""

    def __init__(self, members: MemberBoxes, own: int, op: ReduceOp, scatter: bool) -> None:
        self._members, self._own, self._op, self._scatter = members, own, op, scatter
        self.elements: int = prod(shape_of(members.before[own]))

    def prepare(self, local: Array, *, gaps: bool) -> int:
        self._local = local
        return 1

    def pack(self, number: int) -> None:
        local, module = self._local, array_module(self._local)
        if not self._scatter:
            self._result = module.array(local, order="C")
        else:
            before, after = self._members.before[self._own], self._members.after
            self._result = module.empty(shape_of(after[self._own]), local.dtype)
            self._sources = [flat_source(local[relative(box, before)]) for box in after]
        self._target = flat_target(self._result)

    def call(self, communicator: Communicator, call: Call) -> None:
        if self._scatter:
            sources = [source.flat for source in self._sources]
            communicator.reduce_scatter(call, self._target.flat, sources, self._op)
        else:
            communicator.all_reduce(call, self._target.flat, self._op)

    def unpack(self, number: int) -> Array:
        self._target.finish()
        return self._result


def _is_contiguous(box: Box, within: Box) -> bool:
    """True if ``box`` is contiguous in a C-ordered array that is the box ``within``."""
    inner, outer = shape_of(box), shape_of(within)
    split = [d for d in range(len(inner)) if inner[d] != outer[d]]
    return not split or prod(inner[: split[-1]]) == 1


def _flat(array: Array) -> Flat:
    """Return a C-contiguous array as a flat buffer for a communicator."""
    # Skips the adapter's checks, because there are many rounds.
    return array.reshape(-1) if type(array) is np.ndarray else flat_target(array).flat
