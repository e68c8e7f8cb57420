"""One rank's part of a pairwise reduction, while what the others have for it comes in."""

from __future__ import annotations

import numpy as np

from transport.algorithms.team import Team
from transport.link import OnPiece
from transport.operands.flat import as_bytes
from transport.operands.operand import (
    ARRIVING,
    ARRIVING_NEXT,
    LOADED,
    TOTAL,
    Arrival,
    Operand,
    store,
)
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp

Part = tuple[Flat, int, int]
"""Elements ``[1]`` to ``[2]`` of a buffer."""


class Partial:
    """Reduces what comes for ``result``, beginning with this rank's ``own`` part.

    For each other member: receive into what ``expect`` returns, then ``add``; at the end
    ``finish``. The ranks must always come in the same order. Inputs of floats of 8 and 16 bits
    arrive as they are and are widened here. Works in the group's scratch memory, so there is one
    at a time.
    """

    __slots__ = ("_arrival", "_arriving", "_op", "_own", "_result", "_scaled", "_team", "_total")

    def __init__(self, team: Team, op: ReduceOp, own: Part, result: Flat) -> None:
        scratch = team.scratch
        self._team = team
        self._op = op
        self._result = result
        self._own = Operand(scratch, op, result.dtype, TOTAL).load(*own)
        self._total = result if self._own.dtype == result.dtype else self._own
        # A scaled input travels in the dtype in which it was scaled: the factor is the sender's.
        scaled = op.kind is RedOpType.PREMUL_SUM
        self._scaled = Operand(scratch, op, result.dtype, LOADED) if scaled else None
        dtype = self._own.dtype if scaled else result.dtype
        self._arriving = scratch.flat(ARRIVING, dtype, self._own.size)
        self._arrival: Arrival | None = None

    def outgoing(self, part: Part) -> Flat:
        """Return ``part`` as it travels to the member that it is for; valid until the next."""
        buffer, start, stop = part
        return self._scaled.load(*part) if self._scaled else buffer[start:stop]

    def expect(self, arriving: Flat | None = None) -> tuple[memoryview, OnPiece | None]:
        """Return where the next member's part is to be received, which may be given, and what is to
        be told of it.
        """
        if arriving is not None:
            self._arriving = arriving
        arriving, own = self._arriving, self._own
        if arriving.dtype != own.dtype:
            return as_bytes(arriving), None
        self._arrival = Arrival(self._op, arriving, own, self._total, self._team.table.piece)
        return as_bytes(arriving), self._arrival.on_piece()

    def add(self) -> None:
        """Reduce what has been received."""
        arriving, own, total = self._arriving, self._own, self._total
        if self._arrival is not None:
            self._arrival.finish()
        else:
            widened = self._team.scratch.flat(ARRIVING_NEXT, own.dtype, own.size)
            np.copyto(widened, arriving, casting="unsafe")
            self._op.combine(widened, own, total)
        self._own = total

    def finish(self) -> None:
        """Write the result."""
        self._op.finish(self._total, self._team.size)
        if self._total is not self._result:
            store(self._result, self._total)
