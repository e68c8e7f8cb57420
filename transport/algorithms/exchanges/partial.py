"""One rank's part of a pairwise reduction, while what the others have for it comes in."""

from __future__ import annotations

from transport.algorithms.team import Team
from transport.link import OnPiece
from transport.operands.operand import LOADED, TOTAL, Operand, store
from transport.operands.order import Fold, merges_in
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp

Part = tuple[Flat, int, int]
"""Elements ``[1]`` to ``[2]`` of a buffer."""


class Partial(Fold):
    """Reduces what comes for ``result``, beginning with this rank's ``own`` part.

    The others' contributions come in the order of ``arrivals``, as ``Fold`` says; at the end
    ``finish``. Inputs of floats of 8 and 16 bits arrive as they are and are widened here. Works in
    the group's scratch memory, so there is one at a time.
    """

    __slots__ = ("_dtype", "_result", "_scaled", "_size")

    def __init__(self, team: Team, op: ReduceOp, own: Part, result: Flat) -> None:
        scratch = team.scratch
        loaded = Operand(scratch, op, result.dtype, TOTAL).load(*own)
        total = result if loaded.dtype == result.dtype else loaded
        merges = merges_in(team.rank, team.size)
        super().__init__(scratch, op, merges, loaded, total, team.table.piece)
        self._size = team.size
        self._result = result
        # A scaled input travels in the dtype in which it was scaled: the factor is the sender's.
        scaled = op.kind is RedOpType.PREMUL_SUM
        self._scaled = Operand(scratch, op, result.dtype, LOADED) if scaled else None
        self._dtype = loaded.dtype if scaled else result.dtype

    def outgoing(self, part: Part) -> Flat:
        """Return ``part`` as it travels to the member that it is for; valid until the next."""
        buffer, start, stop = part
        return self._scaled.load(*part) if self._scaled else buffer[start:stop]

    def expect_next(self, arriving: Flat | None = None) -> tuple[Flat, OnPiece | None]:
        """Return where the next member's contribution is to be received, as ``expect`` does."""
        return self.expect(self._dtype, arriving)

    def finish(self) -> None:
        """Write the result."""
        self._op.finish(self._total, self._size)
        if self._total is not self._result:
            store(self._result, self._total)
