"""The calls that only copy, through the board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.call import Call
from transport.errors import HeaderMismatchError
from transport.flat import laps_of
from transport.reduce_op import Flat
from transport.runtime import Membership
from transport.shm.board.board import DONE, Board
from transport.shm.board.layout import BLOCKS, LINE
from transport.shm.collectives.copying import LONG, address, copy, copy_raw
from transport.shm.collectives.exchange import Exchange
from transport.shm.collectives.exchange_plan import Shape
from transport.shm.collectives.places import Places

_SMALL = 16 << 10


class _Spread:
    """An exchange that only copies: ``inputs[i]`` to member i, whose own come to ``outputs[i]``;
    ``same``: ``inputs[0]`` to all.
    """

    __slots__ = ("_copy", "_inputs", "_laps", "_rank", "_same", "outputs")

    def __init__(
        self, rank: int, outputs: Sequence[Flat], inputs: Sequence[Flat], same: bool, laps: Any
    ) -> None:
        self.outputs: Sequence[Flat] = outputs
        self._rank = rank
        self._inputs = inputs
        self._same = same
        self._laps = laps
        self._copy = copy

    def prepare(self) -> Shape:
        expects = tuple([output.nbytes for output in self.outputs])
        if max(expects) >= LONG:
            # Seen as bytes once, and not again for each piece.
            self._copy = copy_raw
            self.outputs = [output.view(np.uint8) for output in self.outputs]
            self._inputs = [input_.view(np.uint8) for input_ in self._inputs]
        dtype = self.outputs[0].dtype
        sends = tuple([input_.nbytes for input_ in self._inputs])
        if self._same:
            sends *= len(expects)
        return Shape(dtype, dtype.itemsize, self._same, sends, expects)

    def sources(self) -> Sequence[Flat]:
        return self._inputs

    def stage(self, into: Flat, peer: int, start: int, stop: int) -> None:
        self._copy(into, self._inputs[0 if self._same else peer][start:stop])

    def keep(self) -> None:
        own, input_ = self.outputs[self._rank], self._inputs[0 if self._same else self._rank]
        if own is input_ or (own.nbytes > _SMALL and address(own) == address(input_)):
            return
        if self._laps is None or not self._laps.copy(own, input_):
            self._copy(own, input_)

    def take(self, arrived: Sequence[Flat], start: int) -> None:
        for output, part in zip(self.outputs, arrived, strict=True):
            if count := part.size:
                self._copy(output[start : start + count], part)


class Copies:
    """The copying calls of one member of a group of at least two. One thread at a time.

    ``piece`` (bytes) is how much a broadcast moves at a time: while the others copy one piece out,
    the root copies the next one in.
    """

    def __init__(
        self, board: Board, exchange: Exchange, places: Places, membership: Membership, piece: int
    ) -> None:
        self._board = board
        self._exchange = exchange
        self._laps = exchange.laps
        self._places = places
        self._membership = membership
        self._piece = min(piece, board.layout.block)
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
        parts = _Spread(self._rank, outputs, inputs, same, laps)
        self._exchange.run(call, parts, met=done is not None)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        """See ``Communicator.gather``."""
        board = self._board
        per_lap = board.layout.block // input_.itemsize
        blocks = board.blocks(input_.dtype)
        board.begin(call)
        places, laps = self._places, laps_of(input_.size, per_lap)
        if outputs is None:
            notes = board.notes(self._rank)
            board.words[notes] = input_.nbytes
            board.words[notes + 1] = where = places.locate(input_) if laps > 1 else 0
            for lap in range(0 if where else laps):
                if lap == 1:
                    board.meet_one(call, root)
                if lap >= BLOCKS:
                    board.reach(call, root, lap - BLOCKS + 2)
                part = input_[lap * per_lap : (lap + 1) * per_lap]
                copy(blocks[self._rank][board.claim(call, lap)][: part.size], part)
                board.publish(lap + 1)
            if where:
                board.publish(1)
                board.reach(call, root, DONE)
        else:
            board.publish(1)
            board.meet(call)
            staged: list[int] = []
            for peer in board.peers:
                self._expect(call, peer, board.words[board.notes(peer)], outputs[peer].nbytes)
                if not board.words[board.notes(peer) + 1]:
                    staged.append(peer)
            copy(outputs[root], input_)
            for lap in range(laps_of(max((outputs[r].size for r in staged), default=0), per_lap)):
                for peer in staged:
                    part = outputs[peer][lap * per_lap : (lap + 1) * per_lap]
                    if part.size:
                        board.reach(call, peer, lap + 1)
                        copy(part, blocks[peer][board.slot(lap)][: part.size])
                board.publish(lap + 2)
            for peer in board.peers:
                if where := board.words[board.notes(peer) + 1]:
                    places.fetch(peer, where, outputs[peer], alone=True)
        board.check_later(call)
        board.close()

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        """See ``Communicator.scatter``."""
        board, size = self._board, self._size
        blocks = board.blocks(output.dtype)
        # The root has a share of its block for every member, so that all copy at the same time.
        share_bytes = board.layout.block // size // LINE * LINE or LINE
        per_lap = share_bytes // output.itemsize
        board.begin(call)
        if inputs is not None:
            notes = board.notes(root)
            most = max(part.size for part in inputs)
            laps = laps_of(most, per_lap)
            wheres = [0] * size
            if laps > 1:
                wheres = [self._places.locate(part, most * output.itemsize) for part in inputs]
            placed = all(wheres)
            for peer in range(size):
                board.words[notes + peer] = inputs[peer].nbytes
                board.words[notes + size + peer] = wheres[peer] if placed else 0
            if placed:
                board.publish(1)
                copy(output, inputs[root])
                board.meet(call)
                board.reach_all(call, DONE)
                board.close()
                return
            for lap in range(laps):
                if lap == 1:
                    board.meet(call)
                if lap >= BLOCKS:
                    for peer in board.peers:
                        # A member whose part is done has nothing to read any more.
                        if inputs[peer].size > (lap - BLOCKS) * per_lap:
                            board.reach(call, peer, lap - BLOCKS + 2)
                block = blocks[root][board.claim(call, lap)]
                for peer in board.peers:
                    part = inputs[peer][lap * per_lap : (lap + 1) * per_lap]
                    copy(block[peer * per_lap : peer * per_lap + part.size], part)
                board.publish(lap + 1)
            copy(output, inputs[root])
        else:
            rank = self._rank
            board.publish(1)
            board.meet_one(call, root)
            notes = board.notes(root)
            self._expect(call, root, board.words[notes + rank], output.nbytes)
            where = board.words[notes + size + rank]
            if where:
                self._places.fetch(root, where, output, alone=self._size == 2)
            for lap in range(0 if where else laps_of(output.size, per_lap)):
                board.reach(call, root, lap + 1)
                part = output[lap * per_lap : (lap + 1) * per_lap]
                at = rank * per_lap
                copy(part, blocks[root][board.slot(lap)][at : at + part.size])
                board.publish(lap + 2)
        board.check_later(call)
        board.close()

    def _expect(self, call: Call, peer: int, sent: int, expected: int) -> None:
        if sent != expected:
            raise HeaderMismatchError(
                f"{self._membership.describe(peer)} sent {sent} bytes in {call.header}, expected"
                f" {expected}",
                peer,
                call.header,
                call.header,
            )
