"""What runs plans with NumPy: where there is no compiled core, or it does not know the dtype, the
operation or the place of some data. It may begin where the core has left a call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.errors import DistBackendError, HeaderMismatchError
from transport.operands.copying import address, copy
from transport.operands.flat import laps_of
from transport.operands.folding import Folding
from transport.operands.gaps import copy_all, gather, scatter
from transport.operands.reduce_op import Flat, ReduceOp
from transport.shm.board.board import DONE, Board
from transport.shm.board.layout import LINE, WORD
from transport.shm.collectives.places import Places
from transport.shm.collectives.steps import ALL, NOTHING, Cut, Op, Part, Plan, Step

_PLACED, _LAPS, _FIRST_LIST = 0, 1, 2
"""Where a card's notes have: whether the arrays are read in place, the number of laps, and then
three lists by member: bytes sent, bytes expected, and places. Where all sizes are known there is
nothing but the place of the only array.
"""

_SMALL = 16 << 10

# An enumeration looks its members up in Python, which takes a tenth of a microsecond.
_WHOLE, _BEFORE, _OWN = Cut.WHOLE, Cut.BEFORE, Cut.OWN


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Runs the plans of one member. One thread at a time.

    ``piece`` (bytes) is how much at least is reduced at a time.
    """

    board: Board
    membership: Membership
    places: Places
    folding: Folding
    piece: int

    def run(
        self,
        plan: Plan,
        call: Call,
        arrays: Sequence[Flat],
        op: ReduceOp | None = None,
        where: Sequence[int] | None = None,
        start: int = 0,
    ) -> None:
        """Carry ``plan`` out from step number ``start`` on, which comes before its loop.

        ``where`` are the places of the arrays that are sent, None where they are staged whatever
        they are. Without ``op`` nothing is reduced. Arrays with gaps have two dims or more.
        """
        if not start:
            self.board.begin(call)
        _Passage(self, plan, call, arrays, op, where).run(start)


class _Passage:
    """A call under way. Sizes are in elements of what is staged, of which arrays have as many."""

    def __init__(
        self,
        by: Interpreter,
        plan: Plan,
        call: Call,
        arrays: Sequence[Flat],
        op: ReduceOp | None,
        where: Sequence[int] | None,
    ) -> None:
        self._by = by
        self._board = board = by.board
        self._plan, self._call, self._arrays, self._op = plan, call, arrays, op
        dtype = arrays[0].dtype
        self._staged = dtype
        if op is not None and op.factor is not None:
            self._staged = Folding.staged_dtype(dtype, op)
        self._itemsize = itemsize = self._staged.itemsize
        self._line = max(1, LINE // itemsize)
        most = max([arrays[array].size for array in plan.sized])
        self._per_lap = plan.capacity // itemsize
        self._laps = 1 if most <= self._per_lap else laps_of(most, self._per_lap)
        if plan.spread:
            self._per_lap = _whole(-(-most // self._laps), self._line)
        self._many = self._laps > 1
        self._where = where if where and self._laps >= plan.places_from else None
        # Where each member's data for this one is read in place; 0: it is staged.
        self._places = [0] * board.size
        self._blocks = board.blocks(self._staged)
        # This member's share of so many elements.
        self._shared, self._share = 0, (0, 0)

    def run(self, start: int) -> None:
        steps, loop, end = self._plan.steps, self._plan.loop, self._plan.end
        self._turn(steps[start:loop], 0)
        first, body = steps[loop], steps[loop + 1 : end]
        for turn in range(first.number, self._laps + first.lap):
            self._turn(body, turn)
        self._turn(steps[end + 1 :], 0)

    def _turn(self, steps: Sequence[Step], turn: int) -> None:
        for step in steps:
            if 0 <= (lap := turn + step.lap) < self._laps:
                _DO[step.op](self, step, lap)

    # Where everything is.

    def _piece(self, array: int, lap: int, cut: Cut) -> tuple[int, int]:
        """Return where a piece of a lap of ``array`` begins and ends."""
        start = lap * self._per_lap
        count = self._arrays[array].size - start
        if not 0 <= count <= self._per_lap:
            count = max(0, min(self._per_lap, count))
        if cut is _WHOLE:
            return start, start + count
        if count != self._shared:
            board, self._shared = self._board, count
            self._share = share_of(count, board.size, board.rank, self._line)
        low, high = self._share
        if cut is _OWN:
            return start + low, start + high
        return (start, start + low) if cut is _BEFORE else (start + high, start + count)

    def _block(self, part: Part, lap: int, start: int, stop: int) -> Flat:
        """Return where elements ``start`` to ``stop`` are in the block of the part's peer."""
        board = self._board
        at = part.share * self._per_lap + start - lap * self._per_lap
        return self._blocks[part.peer][board.slot(lap)][at : at + stop - start]

    def _theirs(self, part: Part, lap: int, start: int, stop: int) -> Flat:
        """Return where the part's peer has elements ``start`` to ``stop``."""
        if where := self._places[part.peer]:
            dtype = self._arrays[part.array].dtype
            place = where + start * dtype.itemsize
            return self._by.places.arena.view(part.peer, place, stop - start, dtype)
        return self._block(part, lap, start, stop)

    # The steps.

    def note(self, _step: Step, _lap: int) -> None:
        board, plan = self._board, self._plan
        at = board.notes(board.rank)
        if plan.known:
            board.words[at + _PLACED] = self._where[0] if self._where else 0
            return
        sends = [self._nbytes(array) for array in plan.sends]
        expects = [self._nbytes(array) for array in plan.expects]
        places = [0] * board.size
        if (where := self._where) is not None:
            places = [0 if array == NOTHING else where[array] for array in plan.sends]
        notes = (self._where is not None, self._laps, *sends, *expects, *places)
        struct.pack_into(f"={len(notes)}Q", board.segment.mapping, at * WORD, *notes)

    def stage(self, step: Step, lap: int) -> None:
        if self._where is not None:
            return
        self._board.claim(self._call, lap)
        for part in step.parts:
            start, stop = self._piece(part.array, lap, part.cut)
            if start == stop:
                continue
            source, into = self._arrays[part.array], self._block(part, lap, start, stop)
            if self._op is not None:
                self._by.folding.stage(into, source, start, stop, self._op)
            elif source.ndim > 1:
                gather(into, source, start)
            else:
                copy(into, source[start:stop])

    def publish(self, step: Step, lap: int) -> None:
        self._board.publish(lap + step.number)

    def keep(self, step: Step, _lap: int) -> None:
        source, output = [self._arrays[part.array] for part in step.parts]
        if output.ndim > 1 or source.ndim > 1:
            copy_all(output, source)
        elif output.nbytes <= _SMALL or address(output) != address(source):
            copy(output, source)

    def meet(self, step: Step, _lap: int) -> None:
        if step.peer == ALL:
            self._board.meet(self._call)
        else:
            self._board.meet_one(self._call, step.peer)

    def survey(self, _step: Step, _lap: int) -> None:
        board, plan, words = self._board, self._plan, self._board.words
        everywhere = self._where is not None or not plan.sources
        for peer in board.peers:
            if plan.expects[peer] == NOTHING:
                continue
            at = board.notes(peer)
            where = words[at + _PLACED]
            if not plan.known:
                self._compare(peer, at)
                if (laps := words[at + _LAPS]) > self._laps:
                    self._laps = laps
                where = where and words[at + _FIRST_LIST + 2 * board.size + board.rank]
            if where:
                self._check_place(peer, where, plan.expects[peer])
            self._places[peer] = where
            everywhere = everywhere and where != 0
        self._many = self._laps > 1
        if everywhere:
            total = self._laps * self._per_lap
            self._per_lap = plan.wide // self._itemsize
            self._laps = laps_of(total, self._per_lap)

    def _compare(self, peer: int, at: int) -> None:
        """Raise HeaderMismatchError where sizes disagree."""
        board, plan, words = self._board, self._plan, self._board.words
        sent = words[at + _FIRST_LIST + board.rank]
        if sent != (expected := self._nbytes(plan.expects[peer])):
            raise self._mismatch(peer, "sent", sent, f"expected {expected}")
        wanted = words[at + _FIRST_LIST + board.size + board.rank]
        if (array := plan.sends[peer]) != NOTHING and wanted != self._nbytes(array):
            raise self._mismatch(peer, "expects", wanted, f"got {self._nbytes(array)} bytes")

    def _check_place(self, peer: int, where: int, array: int) -> None:
        """Raise DistBackendError where ``peer`` has no memory for ``array`` at a place it named."""
        nbytes = self._arrays[array].nbytes
        places = self._by.places
        if places.is_private(where) or places.arena.has(where, nbytes):
            return
        name = self._by.membership.describe(peer)
        raise DistBackendError(
            f"{name} says in {self._call.header} that {nbytes} bytes lie at place {where:#x} of its"
            " shared memory, where it has none: the memory is damaged"
        )

    def _nbytes(self, array: int) -> int:
        return 0 if array == NOTHING else self._arrays[array].nbytes

    def _mismatch(self, peer: int, what: str, nbytes: int, other: str) -> HeaderMismatchError:
        name, header = self._by.membership.describe(peer), self._call.header
        text = f"{name} {what} {nbytes} bytes in {header}, {other}"
        return HeaderMismatchError(text, peer, header, header)

    def reach(self, step: Step, lap: int) -> None:
        self._reach(step.peer, lap + step.number)

    def _reach(self, peer: int, number: int) -> None:
        if peer == ALL:
            self._board.reach_all(self._call, number)
        else:
            self._board.reach(self._call, peer, number)

    def take(self, step: Step, lap: int) -> None:
        for part in step.parts:
            start, stop = self._piece(part.array, lap, part.cut)
            if start < stop:
                self._take(part, lap, start, stop)

    def _take(self, part: Part, lap: int, start: int, stop: int) -> None:
        by, output = self._by, self._arrays[part.array]
        own = part.peer == self._board.rank
        if own and self._where is not None:
            return
        if where := self._places[part.peer]:
            into = output[start:stop] if output.ndim == 1 else np.empty(stop - start, output.dtype)
            place = where + start * output.itemsize
            by.places.fetch(part.peer, place, into, alone=self._plan.alone)
            if output.ndim > 1:
                scatter(output, start, into)
            return
        arrived = self._block(part, lap, start, stop)
        if output.ndim > 1:
            scatter(output, start, arrived)
        else:
            by.folding.unstage(output[start:stop], arrived)

    def fold(self, step: Step, lap: int) -> None:
        into = step.parts[self._board.rank].array if step.number == ALL else step.number
        start, stop = self._piece(into, lap, step.parts[0].cut)
        stretch = max(self._by.piece, self._board.layout.block) // self._itemsize
        for low in range(start, stop, stretch):
            self._fold(step, lap, into, low, min(low + stretch, stop))

    def _fold(self, step: Step, lap: int, into: int, low: int, high: int) -> None:
        folding, op, rank = self._by.folding, self._op, self._board.rank
        assert op is not None
        out = result = self._arrays[into][low:high]
        parts = [
            out if part.peer == rank else self._theirs(part, lap, low, high) for part in step.parts
        ]
        own = self._arrays[number := step.parts[rank].array]
        if op.factor is not None:
            if step.number == ALL:
                # Nobody stages anything there: a place for numbers that are scaled.
                result = self._block(step.parts[rank], lap, low, high)
            parts[rank] = folding.load(own, low, high, op)
        elif number != into and address(own) != address(self._arrays[into]):
            parts[rank] = own[low:high]
        folding.fold(parts, op, result)
        if step.number == ALL:
            for peer in self._board.peers:
                copy(parts[peer], result)
            if result is not out:
                folding.unstage(out, result)

    def check_later(self, _step: Step, _lap: int) -> None:
        self._board.check_later(self._call)

    def close(self, step: Step, _lap: int) -> None:
        if self._many or step.number:
            self._board.close()

    def wait(self, step: Step, lap: int) -> None:
        if self._where is not None:
            self.meet(step, lap)
            self._reach(step.peer, DONE)


_Do = Callable[[_Passage, Step, int], None]
_BY_OP: dict[Op, _Do] = {
    Op.NOTE: _Passage.note,
    Op.STAGE: _Passage.stage,
    Op.PUBLISH: _Passage.publish,
    Op.KEEP: _Passage.keep,
    Op.MEET: _Passage.meet,
    Op.SURVEY: _Passage.survey,
    Op.REACH: _Passage.reach,
    Op.TAKE: _Passage.take,
    Op.FOLD: _Passage.fold,
    Op.CHECK_LATER: _Passage.check_later,
    Op.CLOSE: _Passage.close,
    Op.AWAIT: _Passage.wait,
}
# By number: an enumeration is hashed in Python. LOOP and END are the loop's own.
_DO = tuple(_BY_OP.get(op, _Passage.publish) for op in Op)


def share_of(count: int, size: int, rank: int, line: int) -> tuple[int, int]:
    """Return where the share of ``rank`` of ``size`` in ``count`` elements begins and ends.

    Shares are of whole lines of ``line`` elements, so that no two members write to one.
    """
    share = _whole(-(-count // size), line)
    return min(rank * share, count), min((rank + 1) * share, count)


def _whole(count: int, line: int) -> int:
    """Return ``count`` elements rounded up to whole lines."""
    return -(-count // line) * line
