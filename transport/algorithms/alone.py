"""The collectives of a group of one: its own data is everybody's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.call import Call
from transport.communicators.base import Collectives
from transport.operands.flat import Scratch, laps_of, part_bounds
from transport.operands.operand import Operand, store
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp


class Alone(Collectives):
    """All collectives of the only member of a group; what needs room is done ``segment`` bytes at
    a time.
    """

    rank = 0
    size = 1

    def __init__(self, segment: int) -> None:
        self._scratch = Scratch()
        self._segment = segment

    def barrier(self, call: Call) -> None:
        pass

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        pass

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        reduce(self._scratch, buffer, op, self._segment)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        reduce(self._scratch, buffer, op, self._segment)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        np.copyto(outputs[0], input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        np.copyto(output, inputs[0])
        reduce(self._scratch, output, op, self._segment)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        if outputs is not None:
            np.copyto(outputs[0], input_)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        if inputs is not None:
            np.copyto(output, inputs[0])

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        np.copyto(outputs[0], inputs[0])


def reduce(scratch: Scratch, buffer: Flat, op: ReduceOp, segment: int) -> None:
    """Reduce ``buffer`` over its owner alone, ``segment`` bytes at a time.

    Only scaling changes anything.
    """
    if op.kind is not RedOpType.PREMUL_SUM:
        return
    operand = Operand(scratch, op, buffer.dtype)
    laps = laps_of(buffer.size * operand.dtype.itemsize, segment)
    for lap in range(laps):
        start, stop = part_bounds(buffer.size, laps, lap)
        store(buffer[start:stop], operand.load(buffer, start, stop))
