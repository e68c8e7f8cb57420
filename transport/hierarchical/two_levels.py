"""The collectives of a group over several hosts, with two levels."""

from __future__ import annotations

from collections.abc import Sequence

from transport.call import Call
from transport.communicator import Collectives
from transport.hierarchical import copies, reductions
from transport.hierarchical.levels import Levels
from transport.operands.quiet import quiet
from transport.reduce_op import Flat, ReduceOp


class TwoLevels(Collectives):
    """Every collective on ``levels``."""

    def __init__(self, levels: Levels) -> None:
        self.rank = levels.rank
        self.size = levels.size
        self._levels = levels

    @property
    def inside(self) -> Collectives:
        """The collectives of the members on this host."""
        return self._levels.inside

    def barrier(self, call: Call) -> None:
        copies.barrier(self._levels, call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        copies.broadcast(self._levels, call, buffer, root)

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        with quiet(buffer):
            reductions.all_reduce(self._levels, call, buffer, op)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        with quiet(buffer):
            reductions.reduce(self._levels, call, buffer, op, root)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        copies.all_gather(self._levels, call, outputs, input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        with quiet(output):
            reductions.reduce_scatter(self._levels, call, output, inputs, op)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        copies.gather(self._levels, call, outputs, input_, root)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        copies.scatter(self._levels, call, output, inputs, root)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        copies.all_to_all(self._levels, call, outputs, inputs)
