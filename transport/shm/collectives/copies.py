"""The calls that only copy, through the board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.call import Call
from transport.operands.copying import LONG, address, copy, copy_raw
from transport.operands.flat import laps_of
from transport.operands.gaps import copy_all, gather, scatter
from transport.operands.reduce_op import Flat
from transport.shm.board.board import Board
from transport.shm.board.layout import BLOCKS
from transport.shm.collectives.exchange import Exchange
from transport.shm.collectives.exchange_plan import Shape, share_among
from transport.shm.collectives.places import Places
from transport.shm.collectives.rooted import Rooted

_SMALL = 16 << 10


class _Copied:
    """The parts of an exchange that only copies: ``inputs[i]`` goes to member i, what comes from it
    to ``outputs[i]``; ``own`` is the (output, input) that needs no other member.

    ``same``: ``inputs[0]`` goes to all. Nothing is sent, or expected, where there are no inputs, or
    outputs. ``share`` is as in ``Shape``. Arrays with gaps have two dims or more.
    """

    __slots__ = ("_copy", "_inputs", "_laps", "_own", "_same", "_share", "outputs")

    def __init__(
        self,
        outputs: Sequence[Flat],
        inputs: Sequence[Flat],
        own: tuple[Flat, Flat] | None,
        same: bool,
        share: int,
        laps: Any,
    ) -> None:
        self.outputs: Sequence[Flat] = outputs
        self._inputs = inputs
        self._own = own
        self._same = same
        self._share = share
        self._laps = laps
        self._copy = copy

    def prepare(self, size: int) -> Shape:
        nothing = (0,) * size
        sends = tuple([input_.nbytes for input_ in self._inputs]) or nothing
        expects = tuple([output.nbytes for output in self.outputs]) or nothing
        gaps = any(array.ndim > 1 for array in (*self.outputs, *self._inputs))
        if (max(expects) >= LONG or max(sends) >= LONG) and not gaps:
            # Seen as bytes once, and not again for each piece.
            self._copy = copy_raw
            self.outputs = [output.view(np.uint8) for output in self.outputs]
            self._inputs = [input_.view(np.uint8) for input_ in self._inputs]
        dtype = (self.outputs or self._inputs)[0].dtype
        if len(sends) < size:
            sends *= size
        return Shape(dtype, dtype.itemsize, self._same, self._share, sends, expects)

    def sources(self) -> Sequence[Flat]:
        return self._inputs

    def stage(self, into: Flat, peer: int, start: int, stop: int) -> None:
        source = self._inputs[0 if self._same else peer]
        if source.ndim > 1:
            gather(into, source, start)
        else:
            self._copy(into, source[start:stop])

    def keep(self) -> None:
        if self._own is None:
            return
        output, input_ = self._own
        if output.ndim > 1 or input_.ndim > 1:
            copy_all(output, input_)
            return
        if output is input_ or (output.nbytes > _SMALL and address(output) == address(input_)):
            return
        if self._laps is None or not self._laps.copy(output, input_):
            copy(output, input_)

    def take(self, arrived: Sequence[Flat], start: int) -> None:
        for output, part in zip(self.outputs, arrived, strict=True):
            if not (count := part.size):
                continue
            if output.ndim > 1:
                scatter(output, start, part)
            else:
                self._copy(output[start : start + count], part)


class Copies:
    """The copying calls of one member of a group of at least two. One thread at a time.

    ``piece`` (bytes) is how much a broadcast moves at a time: while the others copy one piece out,
    the root copies the next one in.
    """

    def __init__(self, board: Board, exchange: Exchange, places: Places, piece: int) -> None:
        self._board = board
        self._exchange = exchange
        self._laps = exchange.laps
        self._places = places
        self._rooted = Rooted(board, exchange)
        self._block = block = board.layout.block
        self._piece = min(piece, block)
        self._share = share_among(block, board.size - 1)
        # Smaller than it might be: who scatters stages a piece while the others copy one out.
        self._part = share_among(block, board.size)
        self._rank = board.rank
        self._size = board.size

    def barrier(self, call: Call) -> None:
        """See ``Communicator.barrier``."""
        board = self._board
        board.begin(call)
        board.publish(1)
        board.meet(call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        """See ``Communicator.broadcast``."""
        board, rank, met = self._board, self._rank, False
        blocks = board.blocks(buffer.dtype)
        per_lap = max(1, self._piece // buffer.itemsize)
        laps = laps_of(buffer.size, per_lap)
        alone = self._size == 2
        if (compiled := self._laps) is not None:
            piece, symmetric = per_lap * buffer.itemsize, self._places.are_symmetric([buffer])
            done = compiled.broadcast(call, buffer, root, piece, symmetric)
            if done:
                board.check_later(call)
                return
            met = done is not None
        if not met:
            board.begin(call)
        placed = laps > 1
        if placed and rank == root:
            board.words[board.notes(root)] = where = self._places.locate(buffer, alone=alone)
            if where:
                board.publish(1)
                board.meet(call)
                board.reach_all(call, 2)
                return
        if rank != root:
            if not met:
                board.publish(1)
                board.meet_one(call, root)
            where = board.words[board.notes(root)] if placed else 0
            if where:
                self._places.fetch(root, where, buffer, alone=alone)
                board.publish(2)
                board.check_later(call)
                return
        for lap in range(laps):
            part = buffer[lap * per_lap : (lap + 1) * per_lap]
            if rank == root:
                if lap >= BLOCKS:
                    board.reach_all(call, lap - BLOCKS + 2)
                copy(blocks[rank][board.claim(call, lap)][: part.size], part)
                board.publish(lap + 1)
            else:
                board.reach(call, root, lap + 1)
                copy(part, blocks[root][board.slot(lap)][: part.size])
                if laps > 1:
                    board.publish(lap + 2)
        board.check_later(call)
        if laps > 1:
            board.close()

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        """See ``Communicator.all_gather``."""
        self._spread(call, outputs, [input_], True)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        """See ``Communicator.all_to_all``."""
        self._spread(call, outputs, inputs, False)

    def _spread(
        self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat], same: bool
    ) -> None:
        """Exchange ``inputs``, one for each member; ``same``: one for all."""
        laps, done = self._laps, None
        if laps is not None:
            symmetric = self._places.are_symmetric(inputs)
            done = laps.exchange(call, outputs, inputs, same, symmetric)
            if done:
                return
        own = outputs[self._rank], inputs[0 if same else self._rank]
        share = self._block if same else self._share
        parts = _Copied(outputs, inputs, own, same, share, laps)
        self._exchange.run(call, parts, met=done is not None)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        """See ``Communicator.gather``."""
        if outputs is None:
            parts = _Copied((), [input_], None, True, self._block, self._laps)
            self._rooted.send(call, parts, root)
        else:
            own = outputs[root], input_
            parts = _Copied(_without(outputs, root), (), own, True, self._block, self._laps)
            self._rooted.receive(call, parts, None, alone=True)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        """See ``Communicator.scatter``."""
        if inputs is not None:
            own = output, inputs[root]
            parts = _Copied((), _without(inputs, root), own, False, self._part, self._laps)
            self._rooted.send(call, parts, None)
        else:
            outputs = [output[:0]] * self._size
            outputs[root] = output
            parts = _Copied(outputs, (), None, False, self._part, self._laps)
            self._rooted.receive(call, parts, root, alone=self._size == 2)


def _without(arrays: Sequence[Flat], index: int) -> list[Flat]:
    """Return ``arrays``, with nothing of the one at ``index``."""
    return [array[:0] if i == index else array for i, array in enumerate(arrays)]
