"""The all_reduce, by two ways.

A small one goes the direct way: everybody stages its input and reduces everybody's for itself, with
one meeting. All others have plans, as all other collectives do. All reduce in rank order, and so
give the same bits on every rank.
"""

from __future__ import annotations

from typing import Any

from transport.call import Call, Kind
from transport.operands.copying import LONG, copy
from transport.operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype
from transport.shm.board.board import Board
from transport.shm.collectives.runner import Runner

_DIRECT_OF_TWO = 8
"""How much more data goes the direct way between two members than among more."""

_MOST_COMPILED = 128 << 10
"""From where on the time is that of the memory, whoever moves it."""

# An enumeration looks its members up in Python, which takes a tenth of a microsecond.
_AVG, _ALL_REDUCE = RedOpType.AVG, Kind.ALL_REDUCE


class AllReduce:
    """The all_reduces of one member of a group of at least two. One thread at a time."""

    def __init__(self, board: Board, runner: Runner, direct: int) -> None:
        self._board = board
        self._plan = runner.run
        block = board.layout.block
        self._direct = direct if board.size > 2 else min(_DIRECT_OF_TWO * direct, block)
        self._most_compiled = min(self._direct, _MOST_COMPILED)
        self._rank = board.rank
        self._size = board.size
        # The parts of blocks that the last small call used, by slot, and what it was.
        self._ready: list[list[Flat]] = []
        self._ready_size = self._ready_dtype = -1

    def run(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        """See ``Communicator.all_reduce``."""
        if (
            buffer.size == self._ready_size
            and buffer.dtype.num == self._ready_dtype
            and op.factor is None
        ):
            self._run_at_once(call, buffer, op)
        elif (
            op.factor is not None
            or buffer.nbytes > self._direct
            or reduction_dtype(buffer.dtype) != buffer.dtype
        ):
            self._plan(_ALL_REDUCE, 0, call, (), [buffer], op)
        else:
            self._get_ready(buffer)
            self._run_at_once(call, buffer, op)

    def _get_ready(self, buffer: Flat) -> None:
        """Prepare for more calls like this one, whose ``buffer`` fits a block."""
        self._ready = self._board.small_parts(buffer.dtype, buffer.size)
        self._ready_size, self._ready_dtype = buffer.size, buffer.dtype.num

    def _run_at_once(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        """The direct way for what fits one block, with no more steps than needed."""
        board = self._board
        parts = self._ready[board.begin(call)]
        if buffer.nbytes < LONG:
            parts[self._rank][...] = buffer  # ``[:]`` makes a view first
        else:
            copy(parts[self._rank], buffer)
        board.publish(1)
        board.meet(call)
        self._combine(parts, buffer, op)

    def outline(self) -> tuple[Any, ...] | None:
        """Return what the compiled core needs to make small calls here, if it can."""
        board = self._board.compiled
        return None if board is None else (board, self._most_compiled)

    def resume(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        """Go on with a call that the compiled core has opened, and if it is a small one has begun:
        then ``buffer`` is staged.
        """
        if buffer.nbytes > self._most_compiled:
            self.run(call, buffer, op)
            return
        board = self._board
        board.meet(call)
        parts = board.small_parts(buffer.dtype, buffer.size)
        self._combine(parts[board.slot(0)], buffer, op)

    def _combine(self, parts: list[Flat], own: Flat, op: ReduceOp) -> None:
        """Reduce all members' ``parts`` into ``own``, which is what this member's was staged from.

        What is near this core is read from ``own`` where it is reduced first.
        """
        combine, rank = op.ufunc, self._rank
        if rank == 0:
            combine(own, parts[1], out=own)
        elif rank == 1:
            combine(parts[0], own, out=own)
        else:
            combine(parts[0], parts[1], out=own)
        if self._size > 2:
            for part in parts[2:]:
                combine(own, part, out=own)
        if op.kind is _AVG:
            op.finish(own, self._size)
