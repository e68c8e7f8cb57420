"""The frame of the calls in which every member has something for every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from transport.call import Call
from transport.errors import HeaderMismatchError
from transport.native import core
from transport.reduce_op import Flat
from transport.runtime import Membership
from transport.shm.board.board import Board
from transport.shm.board.layout import WORD
from transport.shm.collectives.arena import Arena
from transport.shm.collectives.exchange_plan import ExchangePlan, Shape, pack_notes
from transport.shm.collectives.places import Places

_PLACED, _LAPS, _FIRST_LIST = 0, 1, 2
"""Where a card's notes have: whether the parts are read in place, the number of laps, and then
three lists by member: bytes sent, bytes expected, and places.
"""

MOST_PLANS = 64
"""Shapes of calls for which the way is kept."""


class Parts(Protocol):
    """One member's side of an exchange."""

    @property
    def outputs(self) -> Sequence[Flat] | None:
        """Where what comes from each member goes as it is; None: it goes to ``take``."""
        ...

    def prepare(self) -> Shape:
        """Return what there is; nothing else is asked before."""
        ...

    def sources(self) -> Sequence[Flat]:
        """Return what this member has for each member; one: the same for all."""
        ...

    def stage(self, into: Flat, peer: int, start: int, stop: int) -> None:
        """Write elements ``start`` to ``stop`` of what is for ``peer`` to ``into``."""
        ...

    def keep(self) -> None:
        """Do what needs no other member, while the others are coming."""
        ...

    def take(self, arrived: Sequence[Flat], start: int) -> None:
        """Use what came from each member for the elements from ``start`` on (own: empty)."""
        ...


class Exchange:
    """All to all in laps, for sizes that may differ by sender and receiver.

    Where all members' parts lie where others can read them, the receivers read them there.
    ``laps`` is what makes calls in the compiled core, None without one: of what is not symmetric,
    whatever its size, since it stages that in less time than it takes to read it.
    """

    def __init__(
        self, board: Board, membership: Membership, arena: Arena, places: Places, piece: int
    ) -> None:
        self._board = board
        self._membership = membership
        self._arena = arena
        self.places = places
        self._piece = piece
        self._memory = board.segment.mapping
        compiled = board.compiled()
        self.laps: Any = None
        if core is not None and compiled is not None:
            self.laps = core.Laps(compiled, board)
        self._plans: dict[Shape, ExchangePlan] = {}

    def run(self, call: Call, parts: Parts, *, placed: bool = True, met: bool = False) -> None:
        """Carry out the call, with the data moved in Python.

        ``placed``: false where no part must be read before it is staged. ``met``: the compiled core
        has begun it, all members have met in it with lap 0 staged, and something is not as usual.
        """
        shape = parts.prepare()
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._make_plan(shape)
        board = self._board
        places = None
        if met:
            parts.keep()
        else:
            board.begin(call)
            if placed and plan.laps > 1:
                places = self._locate(parts)
            self._enter(call, parts, plan, places)
        first, laps = 1, plan.laps
        if places is not None or not self._agrees(plan):
            laps = self._compare(call, plan)
            everywhere = [board.words[board.notes(peer) + _PLACED] for peer in range(board.size)]
            if all(everywhere):
                self._run_in_place(call, parts, plan)
                return
            if any(everywhere):
                first = 2
                if places is not None:
                    self._stage(call, parts, plan, 0, 2)
                else:
                    board.publish(2)
        for lap in range(laps):
            # The block that this overwrites was read before its readers published the step before.
            if lap + 1 < laps:
                self._stage(call, parts, plan, lap + 1, first + lap + 1)
            board.reach_all(call, first + lap)
            if lap < plan.laps:
                parts.take(plan.incoming(lap, board.slot(lap)), lap * plan.per_lap)
        if laps > 1:
            board.close()

    def _enter(
        self, call: Call, parts: Parts, plan: ExchangePlan, places: list[int] | None
    ) -> None:
        """Show what this member has, ``places`` or lap 0; return when all members have done so."""
        board, notes = self._board, plan.notes
        if places is not None:
            notes = pack_notes(1, plan.laps, plan.shape.sends, plan.shape.expects, places)
        at = board.notes(board.rank) * WORD
        self._memory[at : at + len(notes)] = notes
        if places is None:
            self._stage(call, parts, plan, 0, 1)
        else:
            board.publish(1)
        parts.keep()
        board.meet(call)

    def _make_plan(self, shape: Shape) -> ExchangePlan:
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        plan = self._plans[shape] = ExchangePlan(self._board, shape)
        return plan

    def _stage(self, call: Call, parts: Parts, plan: ExchangePlan, lap: int, step: int) -> None:
        board = self._board
        slot = board.claim(call, lap)
        if lap < plan.laps:
            for into, peer, start, stop in plan.outgoing(lap, slot):
                parts.stage(into, peer, start, stop)
        board.publish(step)

    def _locate(self, parts: Parts) -> list[int] | None:
        """Return the places of what there is for each member; None where a part must be staged."""
        sources = parts.sources()
        if parts.outputs is None:
            if self._arena.empty:
                return None
            places = [self._arena.locate(source) for source in sources]
        else:
            nbytes = max(source.nbytes for source in sources)
            if not self.places.are_possible(nbytes):
                return None
            places = [self.places.locate(source, nbytes) for source in sources]
        return places * (self._board.size // len(places)) if all(places) else None

    def _agrees(self, plan: ExchangePlan) -> bool:
        """Whether it takes one look to see that all have sizes that match, and stage."""
        if not plan.uniform:
            return False
        board, memory, notes = self._board, self._memory, plan.notes
        for peer in board.peers:
            at = board.notes(peer) * WORD
            if memory[at : at + len(notes)] != notes:
                return False
        return True

    def _run_in_place(self, call: Call, parts: Parts, plan: ExchangePlan) -> None:
        if parts.outputs is None:
            self._take_in_place(parts, plan.expected, plan.shape.dtype)
        else:
            self._copy_in_place(parts.outputs)
        self._board.publish(2)
        self._board.reach_all(call, 2)

    def _place(self, peer: int) -> int:
        """Return where ``peer`` has what is for this member."""
        board = self._board
        at = board.notes(peer) + _FIRST_LIST + 2 * board.size + board.rank
        return board.words[at]

    def _copy_in_place(self, outputs: Sequence[Flat]) -> None:
        rank, size = self._board.rank, self._board.size
        for peer in (*range(rank + 1, size), *range(rank)):  # not all from one at a time
            self.places.fetch(peer, self._place(peer), outputs[peer])

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

    def _compare(self, call: Call, plan: ExchangePlan) -> int:
        """Return the group's number of laps; raise HeaderMismatchError where sizes disagree."""
        board, laps = self._board, plan.laps
        rank, size, words = board.rank, board.size, board.words
        sends, expects = plan.shape.sends, plan.shape.expects
        for peer in board.peers:
            notes = board.notes(peer)
            laps = max(laps, words[notes + _LAPS])
            sent = words[notes + _FIRST_LIST + rank]
            wanted = words[notes + _FIRST_LIST + size + rank]
            if sent == expects[peer] and wanted == sends[peer]:
                continue
            name = self._membership.describe(peer)
            if sent != expects[peer]:
                text = f"{name} sent {sent} bytes in {call.header}, expected {expects[peer]}"
            else:
                text = f"{name} expects {wanted} bytes in {call.header}, got {sends[peer]} bytes"
            raise HeaderMismatchError(text, peer, call.header, call.header)
        return laps
