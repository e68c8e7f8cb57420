"""What one rank does in each collective of a plan: lay out what it sends, call, put what came.

The three are apart because of when they may run: on the CPU all of them at the call's turn; on a
GPU, where a call is only put on a stream, the first and the last in the caller's thread.

Parts that do not lie in one piece, where they come from or where they go, travel in rounds of a few
hundred KiB by way of small buffers: what was just laid out or has just come is then still in the
cache when it is copied on, and the copy costs little beside the call.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Protocol

import numpy as np

from meshlib.arrays.adapted import Adapted
from meshlib.sharding.local import (
    Array,
    Box,
    array_module,
    flat_source,
    flat_target,
    relative,
    shape_of,
)
from meshlib.sharding.redistribution.across import intersection
from meshlib.sharding.redistribution.plan import ALL_GATHER, Step
from transport.call import Call
from transport.communicator import Communicator
from transport.reduce_op import ReduceOp

ROUND_BYTES = 512 << 10
"""What a rank sends to all others in a round, about."""

MOST_MEMBERS_IN_ROUNDS = 64
"""Larger groups, few members of which are within a host, exchange all at once."""


class Part(Protocol):
    """This rank's part in one collective, or in several that make up one."""

    elements: int
    """How many elements the call is over, the same on all members (0: each has others)."""

    def prepare(self, local: Array) -> int:
        """Take this rank's array; return the number of rounds, the same on all members.

        On a GPU there is one.
        """
        ...

    def pack(self, number: int) -> None:
        """Lay out what is sent in a round."""
        ...

    def call(self, communicator: Communicator, call: Call) -> None:
        """Make the call of the round."""
        ...

    def unpack(self, number: int) -> Array:
        """Put what came in a round to its place; return this rank's array after the step."""
        ...


class Members:
    """Which parts of the global array the members of a step's group have before and after it.

    What ``sender`` has for ``receiver`` (group ranks) is ``sends[sender][receiver]``.
    """

    def __init__(self, step: Step, shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
        mesh = step.source.mesh
        self.before: list[Box] = []
        self.after: list[Box] = []
        # Of equal parts a rank takes that of the member with its own coordinates.
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
        """Return what ``sender`` has for ``receiver`` (group ranks), None if that is nothing."""
        if self._copies[sender] != self._copies[receiver]:
            return None
        return intersection(self.before[sender], self.after[receiver])

    def rounds(self, itemsize: int) -> int:
        """Return how many rounds an exchange takes: 1 where all parts lie in one piece."""
        if itemsize not in self._rounds:
            self._rounds[itemsize] = self._count_rounds(itemsize)
        return self._rounds[itemsize]

    def _count_rounds(self, itemsize: int) -> int:
        size = len(self.before)
        if size > MOST_MEMBERS_IN_ROUNDS:
            return 1
        most, scattered = 1, False
        for sender in range(size):
            # A gather sends one thing to all.
            for receiver in range(size):
                box = self.sent(sender, receiver)
                if box is None or sender == receiver:
                    continue
                leads = self._is_gather or _leads(box, self.before[sender])
                scattered = scattered or not (leads and _leads(box, self.after[receiver]))
                most = max(most, -(-(box[0].stop - box[0].start) // self._rows(box, itemsize)))
        return most if scattered else 1

    def _rows(self, box: Box, itemsize: int) -> int:
        others = 1 if self._is_gather else max(len(self.before) - 1, 1)
        row = prod(shape_of(box)[1:]) * itemsize
        return max(ROUND_BYTES // others // max(row, 1), 1)

    def part_of(self, box: Box | None, number: int, rounds: int, itemsize: int) -> Box | None:
        """Return what of a message travels in a round, None if that is nothing."""
        if box is None or rounds == 1:
            return box
        rows = self._rows(box, itemsize)
        start = box[0].start + number * rows
        if start >= box[0].stop:
            return None
        return (slice(start, min(start + rows, box[0].stop)), *box[1:])


@lru_cache(maxsize=1024)
def members_of(step: Step, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Members:
    """Return the ``Members`` of a step whose group has the global ``ranks``, in that order."""
    return Members(step, shape, ranks)


class Exchange:
    """Every member has something for each: an all_to_all, or, of one thing for all, an all_gather.

    What stays on this rank is copied once, past the call.
    """

    def __init__(self, step: Step, members: Members, own: int) -> None:
        self._members, self._own = members, own
        self._is_gather = step.kind == ALL_GATHER
        self.elements = prod(shape_of(members.after[own])) if self._is_gather else 0

    def prepare(self, local: Array) -> int:
        """See ``Part``."""
        members, own = self._members, self._own
        module, peers = array_module(local), range(len(members.before))
        self._local = local
        self._nothing = module.empty(0, local.dtype)
        self._result = module.empty(shape_of(members.after[own]), local.dtype)
        self._out = [None if p == own else members.sent(own, p) for p in peers]
        self._in = [None if p == own else members.sent(p, own) for p in peers]
        kept = members.sent(own, own)
        if kept is not None:
            self._result[relative(kept, members.after[own])] = local[
                relative(kept, members.before[own])
            ]
        self._rounds = members.rounds(local.dtype.itemsize) if module is np else 1
        self._buffers: dict[tuple[str, int], Array] = {}
        return self._rounds

    def pack(self, number: int) -> None:
        """See ``Part``."""
        before = self._members.before[self._own]
        self._sources: list[Adapted] = []
        if self._is_gather:
            box = self._of_round(before, number)
            view = self._nothing if box is None else self._local[relative(box, before)]
            self._sources.append(flat_source(view))
        else:
            for peer, whole in enumerate(self._out):
                box = self._of_round(whole, number)
                view = self._nothing if box is None else self._local[relative(box, before)]
                if not view.flags.c_contiguous:
                    buffer = self._buffer("out", peer, view)
                    buffer[...] = view
                    view = buffer
                self._sources.append(flat_source(view))
        after = self._members.after[self._own]
        self._targets: list[Adapted] = []
        self._staged: list[tuple[Array, Array]] = []
        for peer, whole in enumerate(self._in):
            if self._is_gather and peer == self._own:
                # Its place has been filled; the call wants one for it all the same.
                self._targets.append(self._sources[0])
                continue
            box = self._of_round(whole, number)
            place = self._nothing if box is None else self._result[relative(box, after)]
            if not place.flags.c_contiguous:
                buffer = self._buffer("in", peer, place)
                self._staged.append((place, buffer))
                place = buffer
            self._targets.append(flat_target(place))

    def call(self, communicator: Communicator, call: Call) -> None:
        """See ``Part``."""
        targets = [target.flat for target in self._targets]
        if self._is_gather:
            communicator.all_gather(call, targets, self._sources[0].flat)
        else:
            communicator.all_to_all(call, targets, [source.flat for source in self._sources])

    def unpack(self, number: int) -> Array:
        """See ``Part``."""
        for target in self._targets:
            target.finish()
        for place, buffer in self._staged:
            place[...] = buffer
        return self._result

    def _of_round(self, box: Box | None, number: int) -> Box | None:
        return self._members.part_of(box, number, self._rounds, self._local.dtype.itemsize)

    def _buffer(self, way: str, peer: int, like: Array) -> Array:
        """Return memory for what goes to or comes from ``peer``: the same in every round."""
        buffer = self._buffers.get((way, peer))
        if buffer is None or buffer.size < like.size:
            buffer = self._buffers[way, peer] = array_module(like).empty(like.size, like.dtype)
        return buffer[: like.size].reshape(like.shape)


class Reduction:
    """The members' arrays are reduced, and each has the result, or keeps a part of it."""

    def __init__(self, members: Members, own: int, op: ReduceOp, scatter: bool) -> None:
        self._members, self._own, self._op, self._scatter = members, own, op, scatter
        self.elements = prod(shape_of(members.before[own]))

    def prepare(self, local: Array) -> int:
        """See ``Part``."""
        self._local = local
        return 1

    def pack(self, number: int) -> None:
        """See ``Part``."""
        local, module = self._local, array_module(self._local)
        if not self._scatter:
            self._result = module.array(local, order="C")
        else:
            before, after = self._members.before[self._own], self._members.after
            self._result = module.empty(shape_of(after[self._own]), local.dtype)
            self._sources = [flat_source(local[relative(box, before)]) for box in after]
        self._target = flat_target(self._result)

    def call(self, communicator: Communicator, call: Call) -> None:
        """See ``Part``."""
        if self._scatter:
            sources = [source.flat for source in self._sources]
            communicator.reduce_scatter(call, self._target.flat, sources, self._op)
        else:
            communicator.all_reduce(call, self._target.flat, self._op)

    def unpack(self, number: int) -> Array:
        """See ``Part``."""
        self._target.finish()
        return self._result


def _leads(box: Box, within: Box) -> bool:
    """Whether ``box`` lies in one piece in a C-ordered array that is ``within``."""
    inner, outer = shape_of(box), shape_of(within)
    split = [d for d in range(len(inner)) if inner[d] != outer[d]]
    return not split or prod(inner[: split[-1]]) == 1
