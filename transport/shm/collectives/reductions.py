"""Reductions through the board.

A small all_reduce goes the direct way: everybody stages its input and reduces everybody's for
itself, with one meeting. For large ones see ``transport.shm.collectives.sharing``. All reduce in rank order,
and so give the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transport.call import Call
from transport.flat import laps_of
from transport.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype
from transport.shm.board.board import DONE, Board
from transport.shm.board.layout import BLOCKS
from transport.shm.collectives.arena import Arena
from transport.shm.collectives.copying import LONG, copy
from transport.shm.collectives.exchange import Exchange
from transport.shm.collectives.folding import Folding
from transport.shm.collectives.scattered import Scattered
from transport.shm.collectives.sharing import Sharing

_DIRECT_OF_TWO = 8
"""How much more data goes the direct way between two members than among more."""

_MOST_COMPILED = 128 << 10
"""From where on the time is that of the memory, whoever moves it."""

# An enumeration looks its members up in Python, which takes a tenth of a microsecond.
_AVG = RedOpType.AVG


class Reductions:
    """The reductions of one member of a group of at least two. One thread at a time."""

    def __init__(
        self, board: Board, exchange: Exchange, arena: Arena, direct: int, piece: int
    ) -> None:
        self._board = board
        self._arena = arena
        self._piece = piece
        self._exchange = exchange
        block = board.layout.block
        self._direct = direct if board.size > 2 else min(_DIRECT_OF_TWO * direct, block)
        self._most_compiled = min(self._direct, _MOST_COMPILED)
        self._folding = Folding(board.size, piece)
        self._sharing = Sharing(board, arena, self._folding, piece)
        self._rank = board.rank
        self._size = board.size
        # The parts of blocks that the last small call used, by slot, and what it was.
        self._ready: list[list[Flat]] = []
        self._ready_size = self._ready_dtype = -1

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        """See ``Communicator.all_reduce``."""
        if (
            buffer.size == self._ready_size
            and buffer.dtype.num == self._ready_dtype
            and op.factor is None
        ):
            self._all_reduce_at_once(call, buffer, op)
        elif (
            op.factor is not None
            or buffer.nbytes > self._direct
            or reduction_dtype(buffer.dtype) != buffer.dtype
        ):
            self._sharing.all_reduce(call, buffer, op)
        else:
            self._get_ready(buffer)
            self._all_reduce_at_once(call, buffer, op)

    def _get_ready(self, buffer: Flat) -> None:
        """Prepare for more calls like this one, whose ``buffer`` fits a block."""
        self._ready = self._board.small_parts(buffer.dtype, buffer.size)
        self._ready_size, self._ready_dtype = buffer.size, buffer.dtype.num

    def _all_reduce_at_once(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
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
        board = self._board.compiled()
        return None if board is None else (board, self._most_compiled)

    def resume_all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        """Go on with a call that the compiled core has opened, and if it is a small one has begun:
        then ``buffer`` is staged.
        """
        if buffer.nbytes > self._most_compiled:
            self.all_reduce(call, buffer, op)
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

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        """See ``Communicator.reduce``."""
        board, folding, rank = self._board, self._folding, self._rank
        blocks = board.blocks(folding.staged_dtype(buffer.dtype, op))
        per_lap = blocks[0][0].size
        laps = laps_of(buffer.size, per_lap)
        board.begin(call)
        if rank == root:
            board.publish(1)
            board.meet(call)
            self._reduce_at_root(call, buffer, op, blocks)
        else:
            # Scaled inputs would have to be written back to be read in place.
            placed = laps > 1 and op.factor is None
            where = self._arena.locate(buffer) if placed else 0
            board.words[board.notes(rank)] = where
            for lap in range(0 if where else laps):
                if lap == 1:
                    board.meet_one(call, root)
                if lap >= BLOCKS:
                    board.reach(call, root, lap - BLOCKS + 2)
                start, stop = lap * per_lap, min((lap + 1) * per_lap, buffer.size)
                into = blocks[rank][board.claim(call, lap)]
                folding.stage(into[: stop - start], buffer, start, stop, op)
                board.publish(lap + 1)
            if where:
                board.publish(1)
                board.reach(call, root, DONE)
            board.check_later(call)
        if laps > 1:
            board.close()

    def _reduce_at_root(
        self, call: Call, buffer: Flat, op: ReduceOp, blocks: list[list[Flat]]
    ) -> None:
        board, folding, rank = self._board, self._folding, self._rank
        per_lap = blocks[0][0].size
        laps = laps_of(buffer.size, per_lap)
        views: dict[int, Flat] = {}
        for peer in board.peers:
            if where := board.words[board.notes(peer)]:
                views[peer] = self._arena.view(peer, where, buffer.size, buffer.dtype)
        for lap in range(laps):
            start, stop = lap * per_lap, min((lap + 1) * per_lap, buffer.size)
            slot = board.slot(lap)
            own = folding.load(buffer, start, stop, op)
            parts: list[Flat] = []
            for peer in range(self._size):
                if peer == rank:
                    parts.append(own)
                elif peer in views:
                    parts.append(views[peer][start:stop])
                else:
                    board.reach(call, peer, lap + 1)
                    parts.append(blocks[peer][slot][: stop - start])
            folding.fold(parts, op, own if op.factor is None else buffer[start:stop])
            if laps > 1:
                board.publish(lap + 2)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        """See ``Communicator.reduce_scatter``."""
        # Scaled inputs are not what lies in anybody's memory.
        placed, done = op.factor is None, None
        if placed and (laps := self._exchange.laps) is not None:
            symmetric = self._exchange.places.are_symmetric(inputs)
            done = laps.reduce_scatter(call, output, inputs, op.code, symmetric)
            if done:
                return
        parts = Scattered(self._folding, self._rank, output, inputs, op)
        self._exchange.run(call, parts, placed=placed, met=done is not None)
