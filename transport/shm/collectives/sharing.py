"""Large all_reduces through the board: each member reduces its share of the data.

*Staged*, in laps of a block: each member stages what others reduce, share by share. A member
reduces its share from all other blocks and its own array, and writes the result back to where it
was staged, and into its array; then everybody takes the other shares' results out of its own block.
So a place in a block goes back and forth between two members, each of which reads it before it
writes it. To write what the other has only read takes processors longer: between distant cores the
whole call took two and a half times as long. There is one meeting for each lap, and one more.

*In place*, where all have the array at one place of the symmetric memory: each member reduces its
share straight from the others' arrays, and writes the result into them.

The compiled core does the same with the usual dtypes (``transport/native/shm/shares.c``); on each
member for itself, whatever the others have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transport.call import Call
from transport.operands.copying import copy
from transport.operands.flat import laps_of
from transport.operands.folding import Folding
from transport.operands.reduce_op import Flat, ReduceOp
from transport.shm.board.board import Board
from transport.shm.board.layout import LINE
from transport.shm.collectives.arena import Arena

_NO_ARENA = -1


class Sharing:
    """The large all_reduces of one member of a group of at least two. One thread at a time.

    ``piece`` (bytes) is how much at least is reduced at a time where that is done in place;
    ``laps`` is what makes calls in the compiled core, None without one.
    """

    def __init__(self, board: Board, arena: Arena, folding: Folding, piece: int, laps: Any) -> None:
        self._board = board
        self._laps = laps
        self._arena = arena
        self._folding = folding
        self._stretch = max(piece, board.layout.block)
        self._rank = board.rank
        self._size = board.size

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        """See ``Communicator.all_reduce``."""
        place = self._locate(buffer, op)
        board = self._board
        if op.factor is None and self._laps is not None:
            apart = self._arena.apart(place) if place > 0 else 0
            if self._laps.all_reduce(call, buffer, op.code, place, apart):
                return
        folding, rank, size = self._folding, self._rank, self._size
        blocks = board.blocks(folding.staged_dtype(buffer.dtype, op))
        own_blocks, others = blocks[rank], [blocks[peer] for peer in board.peers]
        line = max(1, LINE // own_blocks[0].itemsize)
        laps = laps_of(buffer.size, own_blocks[0].size)
        per_lap = _whole(-(-buffer.size // laps), line)

        def lap_of(lap: int) -> tuple[int, int, int, int]:
            """Where the lap begins in the array; from there, this member's share, and the end."""
            begin = lap * per_lap
            count = min(per_lap, buffer.size - begin)
            return begin, *share_of(count, size, rank, line), count

        def stage(lap: int, step: int) -> None:
            begin, low, high, end = lap_of(lap)
            block = own_blocks[board.claim(call, lap)]
            if low:
                folding.stage(block[:low], buffer, begin, begin + low, op)
            if high < end:
                folding.stage(block[high:end], buffer, begin + high, begin + end, op)
            board.publish(step)

        def reduce(lap: int) -> None:
            begin, low, high, _ = lap_of(lap)
            slot, own = board.slot(lap), buffer[begin + low : begin + high]
            parts = [of[slot][low:high] for of in blocks]
            result = own
            if op.factor is None:
                parts[rank] = own
            else:
                # Nobody stages anything there: a place for numbers that are scaled.
                result = parts[rank]
                parts[rank] = folding.load(buffer, begin + low, begin + high, op)
            folding.fold(parts, op, result)
            for other in others:
                copy(other[slot][low:high], result)
            if result is not own:
                folding.unstage(own, result)

        def take(lap: int) -> None:
            begin, low, high, end = lap_of(lap)
            block = own_blocks[board.slot(lap)]
            if low:
                folding.unstage(buffer[begin : begin + low], block[:low])
            if high < end:
                folding.unstage(buffer[begin + high : begin + end], block[high:end])

        first = self._enter(call, buffer, op, place, stage)
        if first is None:
            return
        # At step ``first + k`` lap k is staged, and lap k - 1 reduced.
        for lap in range(laps):
            board.reach_all(call, first + lap)
            reduce(lap)
            # The block that this overwrites has been free since lap - 3 was taken out of it.
            if lap + 1 < laps:
                stage(lap + 1, first + lap + 1)
            else:
                board.publish(first + laps)
            if lap > 0:
                take(lap - 1)
        # From then on nobody uses another's block, or its own before the next call.
        board.reach_all(call, first + laps)
        take(laps - 1)

    def _locate(self, buffer: Flat, op: ReduceOp) -> int:
        """Return what this member notes: where it has ``buffer`` in symmetric memory, or 0."""
        if self._arena.empty:
            return _NO_ARENA
        # Scaled inputs would have to be written back to be reduced in place.
        return self._arena.locate(buffer) if op.factor is None else 0

    def _enter(
        self,
        call: Call,
        buffer: Flat,
        op: ReduceOp,
        place: int,
        stage: Callable[[int, int], None],
    ) -> int | None:
        """Begin a call, whose inputs are staged by ``stage(lap, step)``.

        Returns the step at which lap 0 is staged on all members; None when all was done in place.
        """
        board = self._board
        board.begin(call)
        if place == _NO_ARENA:
            stage(0, 1)
            board.meet(call)
            return 1
        board.words[board.notes(self._rank)] = place
        if place:
            board.publish(1)
        else:
            stage(0, 1)
        board.meet(call)
        words = board.words
        places = [words[board.notes(rank)] for rank in range(self._size)]
        if not any(places):
            return 1
        if place and places.count(place) == self._size:
            self._reduce_in_place(call, buffer, op, place)
            return None
        if place:
            stage(0, 2)
        else:
            board.publish(2)
        return 2

    def _reduce_in_place(self, call: Call, buffer: Flat, op: ReduceOp, place: int) -> None:
        board, rank = self._board, self._rank
        views = self._arena.views(place, buffer.size, buffer.dtype)
        line = max(1, LINE // buffer.itemsize)
        low, high = share_of(buffer.size, self._size, rank, line)
        step = self._stretch // buffer.itemsize
        for start in range(low, high, step):
            part = slice(start, min(start + step, high))
            parts = [view[part] for view in views]
            result = parts[rank]
            self._folding.fold(parts, op, result)
            for peer in board.peers:
                copy(parts[peer], result)
        board.publish(2)
        board.reach_all(call, 2)


def share_of(count: int, size: int, rank: int, line: int) -> tuple[int, int]:
    """Return where the share of ``rank`` of ``size`` in ``count`` elements begins and ends.

    Shares are of whole lines of ``line`` elements, so that no two members write to one.
    """
    share = _whole(-(-count // size), line)
    return min(rank * share, count), min((rank + 1) * share, count)


def _whole(count: int, line: int) -> int:
    """Return ``count`` elements rounded up to whole lines."""
    return -(-count // line) * line
