"""The collectives of a group with one member."""

from __future__ import annotations

from collections.abc import Sequence

from transport._calls.call import Call
from transport._communicators.base import BufferCollectives
from transport._operands.flat import Scratch, copy, part_bounds, segments_of
from transport._operands.operand import Operand, store
from transport._operands.quiet import quietly
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp


class Alone(BufferCollectives):
    """The collectives of a group with one member: they copy or scale its data.

    Scratch memory holds at most ``segment`` bytes. ``all_gather`` and ``all_to_all`` also accept
    arrays that are not contiguous.
    """

    rank = 0
    size = 1

    def __init__(self, segment: int) -> None:
        self._scratch = Scratch()
        self._segment = segment

    def check_open(self) -> None:
        """Raise ``CommunicatorAbortedError`` after an abort, in subclasses that can be aborted."""

    def barrier(self, call: Call) -> None:
        self.check_open()

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        self.check_open()

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        self.check_open()
        # Over one member only PREMUL_SUM changes the values.
        if op.kind is RedOpType.PREMUL_SUM:
            self._scale(buffer, op)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        self.all_reduce(call, buffer, op)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        self.check_open()
        copy(outputs[0], input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self.check_open()
        copy(output, inputs[0])
        self.all_reduce(call, output, op)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        self.check_open()
        if outputs is not None:
            copy(outputs[0], input_)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        self.check_open()
        if inputs is not None:
            copy(output, inputs[0])

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        self.check_open()
        copy(outputs[0], inputs[0])

    @quietly
    def _scale(self, buffer: Flat, op: ReduceOp) -> None:
        operand = Operand(self._scratch, op, buffer.dtype)
        chunks = segments_of(buffer.size * operand.dtype.itemsize, self._segment)
        for chunk in range(chunks):
            start, stop = part_bounds(buffer.size, chunks, chunk)
            store(buffer[start:stop], operand.load(buffer, start, stop))
