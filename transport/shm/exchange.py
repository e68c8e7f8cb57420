"""The frame of the calls in which every member has something for every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from transport.call import Call
from transport.errors import HeaderMismatchError
from transport.flat import laps_of
from transport.reduce_op import Flat
from transport.runtime import Membership
from transport.shm.arena import Arena
from transport.shm.board import Board
from transport.shm.layout import LINE
from transport.shm.places import Places

_PLACED, _LAPS, _FIRST_LIST = 0, 1, 2
"""Where a card's notes have: whether the parts are read in place, the number of laps, and then
three lists by member: bytes sent, bytes expected, and places.
"""


class Parts(Protocol):
    """One member's side of an exchange."""

    @property
    def outputs(self) -> Sequence[Flat] | None:
        """Where what comes from each member goes as it is; None: it goes to ``take``."""
        ...

    def sources(self) -> Sequence[Flat]:
        """Return what this member has for each member."""
        ...

    def stage(self, into: Flat, peer: int, start: int, stop: int) -> None:
        """Write elements ``start`` to ``stop`` of what is for ``peer`` to ``into``."""
        ...

    def keep(self) -> None:
        """Do what needs no other member, while the others are coming."""
        ...

    def take(self, arrived: list[Flat], start: int) -> None:
        """Use what came from each member for the elements from ``start`` on (own: empty)."""
        ...


class Exchange:
    """All to all in laps, for sizes that may differ by sender and receiver.

    Where all members' parts lie where others can read them, the receivers read them there.
    """

    def __init__(
        self, board: Board, membership: Membership, arena: Arena, places: Places, piece: int
    ) -> None:
        self._board = board
        self._membership = membership
        self._arena = arena
        self._places = places
        self._piece = piece

    def run(
        self,
        call: Call,
        parts: Parts,
        staged: np.dtype[np.generic],
        itemsize: int,
        expects: Sequence[int],
        *,
        same: bool = False,
        placed: bool = True,
    ) -> None:
        """Carry out the call: ``parts.sources()`` to the members, ``expects[i]`` bytes from each.

        What is staged has the dtype ``staged``; sizes are of elements of ``itemsize``. ``same``:
        all get the same, which is staged once (with this rank as ``peer``). ``placed``: false
        where a part must not be read before it is staged.
        """
        board = self._board
        rank, size = board.rank, board.size
        sources = parts.sources()
        sends = [source.nbytes for source in sources]
        blocks = board.blocks(staged)
        share_bytes = board.layout.block // (1 if same else size - 1) // LINE * LINE or LINE
        per_lap = share_bytes // staged.itemsize
        counts = [nbytes // itemsize for nbytes in sends]
        expected = [nbytes // itemsize for nbytes in expects]
        laps = max(laps_of(count, per_lap) for count in (*counts, *expected))

        def stage(lap: int, step: int) -> None:
            block = blocks[rank][board.claim(call, lap)]
            start = lap * per_lap
            for peer in (rank,) if same else board.peers:
                stop = min(start + per_lap, counts[peer])
                if start < stop:
                    at = 0 if same else _share(peer, rank) * per_lap
                    parts.stage(block[at : at + stop - start], peer, start, stop)
            board.publish(step)

        board.begin(call)
        places = [0] * size
        if placed and laps > 1:
            places = self._locate(parts, sources[:1] if same else sources)
            places *= size // len(places)
        in_place = all(places)
        self._write_notes(in_place, laps, sends, expects, places)
        if in_place:
            board.publish(1)
        else:
            stage(0, 1)
        parts.keep()
        board.meet(call)
        laps = self._compare(call, laps, sends, expects)
        everywhere = [board.words[board.notes(peer) + _PLACED] for peer in range(size)]
        if all(everywhere):
            if parts.outputs is None:
                self._take_in_place(parts, expected, staged)
            else:
                self._copy_in_place(parts.outputs)
            board.publish(2)
            board.reach_all(call, 2)
            return
        first = 1
        if any(everywhere):
            first = 2
            if in_place:
                stage(0, 2)
            else:
                board.publish(2)
        for lap in range(laps):
            # The block that this overwrites was read before its readers published the step before.
            if lap + 1 < laps:
                stage(lap + 1, first + lap + 1)
            board.reach_all(call, first + lap)
            start, slot = lap * per_lap, board.slot(lap)
            arrived: list[Flat] = []
            for peer in range(size):
                at = 0 if same or peer == rank else _share(rank, peer) * per_lap
                stop = min(start + per_lap, expected[peer]) if peer != rank else start
                arrived.append(blocks[peer][slot][at : at + max(0, stop - start)])
            parts.take(arrived, start)
        board.close()

    def _write_notes(
        self,
        in_place: bool,
        laps: int,
        sends: Sequence[int],
        expects: Sequence[int],
        places: Sequence[int],
    ) -> None:
        board, size = self._board, self._board.size
        words, notes = board.words, board.notes(board.rank)
        words[notes + _PLACED] = in_place
        words[notes + _LAPS] = laps
        at = notes + _FIRST_LIST
        for i in range(size):
            words[at + i] = sends[i]
            words[at + size + i] = expects[i]
            words[at + 2 * size + i] = places[i]

    def _locate(self, parts: Parts, sources: Sequence[Flat]) -> list[int]:
        """Return the places of ``sources``, 0 for those that must be staged."""
        if parts.outputs is None:
            return [self._arena.locate(source) for source in sources]
        nbytes = max(source.nbytes for source in sources)
        return [self._places.locate(source, nbytes) for source in sources]

    def _place(self, peer: int) -> int:
        """Return where ``peer`` has what is for this member."""
        board = self._board
        at = board.notes(peer) + _FIRST_LIST + 2 * board.size + board.rank
        return board.words[at]

    def _copy_in_place(self, outputs: Sequence[Flat]) -> None:
        rank, size = self._board.rank, self._board.size
        for peer in (*range(rank + 1, size), *range(rank)):  # not all from one at a time
            self._places.fetch(peer, self._place(peer), outputs[peer])

    def _take_in_place(
        self, parts: Parts, expected: Sequence[int], dtype: np.dtype[np.generic]
    ) -> None:
        views: list[Flat] = []
        for peer in range(self._board.size):
            count = expected[peer] if peer != self._board.rank else 0
            views.append(self._arena.view(peer, self._place(peer), count, dtype))
        step = max(1, self._piece // dtype.itemsize)
        for start in range(0, max(view.size for view in views), step):
            parts.take([view[start : start + step] for view in views], start)

    def _compare(self, call: Call, laps: int, sends: Sequence[int], expects: Sequence[int]) -> int:
        """Return the group's number of laps; raise HeaderMismatchError where sizes disagree."""
        board = self._board
        rank, size, words = board.rank, board.size, board.words
        for peer in board.peers:
            notes = board.notes(peer)
            laps = max(laps, words[notes + _LAPS])
            sent = words[notes + _FIRST_LIST + rank]
            wanted = words[notes + _FIRST_LIST + size + rank]
            name = self._membership.describe(peer)
            if sent != expects[peer]:
                text = f"{name} sent {sent} bytes in {call.header}, expected {expects[peer]}"
            elif wanted != sends[peer]:
                text = f"{name} expects {wanted} bytes in {call.header}, got {sends[peer]} bytes"
            else:
                continue
            raise HeaderMismatchError(text, peer, call.header, call.header)
        return laps


def _share(peer: int, owner: int) -> int:
    """Return which share of ``owner``'s block is ``peer``'s: it has none for itself."""
    return peer - (peer > owner)
