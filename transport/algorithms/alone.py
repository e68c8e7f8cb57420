"""Reducing over a group of one."""

from __future__ import annotations

from transport.algorithms.operand import Operand, store
from transport.flat import Scratch, laps_of, part_bounds
from transport.reduce_op import Flat, RedOpType, ReduceOp


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
