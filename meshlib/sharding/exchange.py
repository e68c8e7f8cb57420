"""What one rank does in each collective of a plan: lay out what it sends, call, put what came.

The three are apart because of when they may run: on the CPU all of them at the call's turn; on a
GPU, where a call is only put on a stream, the first and the last in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np

from meshlib.adapted import Adapted
from meshlib.sharding.across import intersection
from meshlib.sharding.local import (
    Array,
    Box,
    array_module,
    count_of,
    flat_source,
    flat_target,
    relative,
    shape_of,
)
from meshlib.sharding.plan import Step
from transport.call import Call
from transport.communicator import Communicator
from transport.reduce_op import ReduceOp

Allocate = Callable[[int, np.dtype[Any]], Any]

PIECE_BYTES = 1 << 20
"""From so many bytes on, what is packed goes to memory that the others can read in place."""

MOST_READERS = 64
"""In larger groups, few of which are within a host, it does not."""


class Part(Protocol):
    """This rank's part in one collective."""

    elements: int

    def pack(self, local: Array, allocate: Allocate | None) -> None:
        """Lay out what is sent, from this rank's array; ``allocate`` gives symmetric memory."""
        ...

    def call(self, communicator: Communicator, call: Call) -> None:
        """Make the call."""
        ...

    def unpack(self) -> Array:
        """Return this rank's array after the step."""
        ...


class Members:
    """Which parts of the global array the members of a step's group have before and after it."""

    def __init__(self, step: Step, shape: Sequence[int], ranks: Sequence[int], rank: int) -> None:
        mesh = step.source.mesh
        self.own = ranks.index(rank)
        coordinates = [mesh.coordinate_of(member) for member in ranks]
        self.before: list[Box] = []
        self.after: list[Box] = []
        # Of equal parts a rank takes that of the member with its own coordinates.
        replicated = [i for i in step.source.replicated_dims if i in step.mesh_dims]
        self.copies: list[tuple[int, ...]] = []
        for at in coordinates:
            assert at is not None, "members of a mesh's group are in the mesh"
            self.before.append(step.source.slices_at(shape, at))
            self.after.append(step.target.slices_at(shape, at))
            self.copies.append(tuple(at[i] for i in replicated))

    def sends(self, sender: int, receiver: int) -> Box | None:
        """Return what ``sender`` has for ``receiver`` (group ranks), None if that is nothing."""
        if self.copies[sender] != self.copies[receiver]:
            return None
        return intersection(self.before[sender], self.after[receiver])


class Incoming:
    """Where what comes from each member goes: straight to its place, or by way of a buffer."""

    def __init__(self, members: Members, boxes: Sequence[Box | None], like: Array) -> None:
        module, after = array_module(like), members.after[members.own]
        self.result: Array = module.empty(shape_of(after), like.dtype)
        self.targets: list[Adapted] = []
        self._staged: list[tuple[Array, Array]] = []
        nothing = module.empty(0, like.dtype)
        for box in boxes:
            place = nothing if box is None else self.result[relative(box, after)]
            if not place.flags.c_contiguous:
                buffer = module.empty(place.shape, like.dtype)
                self._staged.append((place, buffer))
                place = buffer
            self.targets.append(flat_target(place))

    def place(self) -> Array:
        """Return the result, with what came by way of buffers in its place."""
        for target in self.targets:
            target.finish()
        for place, buffer in self._staged:
            place[...] = buffer
        return self.result


class AllGather:
    """Every member has something that all are to have, whatever dims it lies along."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.elements = prod(shape_of(members.after[members.own]))

    def pack(self, local: Array, allocate: Allocate | None) -> None:
        """See ``Part``."""
        members = self._members
        boxes = [members.sends(peer, members.own) for peer in range(len(members.before))]
        self._incoming = Incoming(members, boxes, local)
        self._source = flat_source(local)

    def call(self, communicator: Communicator, call: Call) -> None:
        """See ``Part``."""
        flats = [target.flat for target in self._incoming.targets]
        communicator.all_gather(call, flats, self._source.flat)

    def unpack(self) -> Array:
        """See ``Part``."""
        return self._incoming.place()


class AllToAll:
    """Every member has something else for each: the parts that overlap.

    What stays on this rank is copied once, past the call. What is to be sent and does not lie in
    one piece is packed into symmetric memory if there is much of it: that takes the place of the
    copy by which the call would stage it.
    """

    elements = 0  # each member sends and receives other sizes

    def __init__(self, members: Members) -> None:
        self._members = members
        peers = range(len(members.before))
        own = members.own
        self._out = [None if p == own else members.sends(own, p) for p in peers]
        self._in = [None if p == own else members.sends(p, own) for p in peers]

    def pack(self, local: Array, allocate: Allocate | None) -> None:
        """See ``Part``."""
        members = self._members
        before, after = members.before[members.own], members.after[members.own]
        self._incoming = Incoming(members, self._in, local)
        kept = members.sends(members.own, members.own)
        if kept is not None:
            self._incoming.result[relative(kept, after)] = local[relative(kept, before)]
        views = [None if box is None else local[relative(box, before)] for box in self._out]
        self._sources = [flat_source(view) for view in self._packed(views, local, allocate)]

    def _packed(
        self, views: Sequence[Array | None], local: Array, allocate: Allocate | None
    ) -> list[Array]:
        module = array_module(local)
        nothing = module.empty(0, local.dtype)
        if allocate is None:
            return [nothing if view is None else view for view in views]
        ends = np.cumsum([0, *(0 if view is None else view.size for view in views)]).tolist()
        memory = allocate(self._most_sent(), local.dtype)
        packed: list[Array] = []
        for view, (start, stop) in zip(views, pairwise(ends), strict=True):
            part = memory[start:stop]
            if view is not None:
                part.reshape(view.shape)[...] = view
            packed.append(part)
        return packed

    def wants_memory(self, itemsize: int) -> bool:
        """Whether there is enough to pack on any member, as far as all members can tell alike."""
        members = self._members
        if len(members.before) > MOST_READERS:
            return False
        contiguous = all(
            _leads(box, members.before[sender])
            for sender, box in ((s, self._any_sent(s)) for s in range(len(members.before)))
            if box is not None
        )
        return not contiguous and self._most_sent() * itemsize >= PIECE_BYTES

    def _any_sent(self, sender: int) -> Box | None:
        members = self._members
        for receiver in range(len(members.after)):
            if receiver != sender and (box := members.sends(sender, receiver)) is not None:
                return box
        return None

    def _most_sent(self) -> int:
        members = self._members
        everyone = range(len(members.before))
        return max(count_of([members.sends(s, r) for r in everyone if r != s]) for s in everyone)

    def call(self, communicator: Communicator, call: Call) -> None:
        """See ``Part``."""
        targets = [target.flat for target in self._incoming.targets]
        communicator.all_to_all(call, targets, [source.flat for source in self._sources])

    def unpack(self) -> Array:
        """See ``Part``."""
        return self._incoming.place()


class ReduceScatter:
    """The members' arrays are reduced, and each keeps a part of the result."""

    def __init__(self, members: Members, op: ReduceOp) -> None:
        self._members, self._op = members, op
        self.elements = prod(shape_of(members.before[members.own]))

    def pack(self, local: Array, allocate: Allocate | None) -> None:
        """See ``Part``."""
        members = self._members
        before, after = members.before[members.own], members.after[members.own]
        self._result = array_module(local).empty(shape_of(after), local.dtype)
        self._target = flat_target(self._result)
        parts = [local[relative(box, before)] for box in members.after]
        self._sources = [flat_source(part) for part in parts]

    def call(self, communicator: Communicator, call: Call) -> None:
        """See ``Part``."""
        sources = [source.flat for source in self._sources]
        communicator.reduce_scatter(call, self._target.flat, sources, self._op)

    def unpack(self) -> Array:
        """See ``Part``."""
        self._target.finish()
        return self._result


class AllReduce:
    """The members' arrays are reduced, and each has the result."""

    def __init__(self, members: Members, op: ReduceOp) -> None:
        self._op = op
        self.elements = prod(shape_of(members.before[members.own]))

    def pack(self, local: Array, allocate: Allocate | None) -> None:
        """See ``Part``."""
        self._result = array_module(local).array(local, order="C")
        self._target = flat_target(self._result)

    def call(self, communicator: Communicator, call: Call) -> None:
        """See ``Part``."""
        communicator.all_reduce(call, self._target.flat, self._op)

    def unpack(self) -> Array:
        """See ``Part``."""
        self._target.finish()
        return self._result


def _leads(box: Box, within: Box) -> bool:
    """Whether ``box`` lies in one piece in a C-ordered array that is ``within``."""
    inner, outer = shape_of(box), shape_of(within)
    split = [d for d in range(len(inner)) if inner[d] != outer[d]]
    return not split or prod(inner[: split[-1]]) == 1
