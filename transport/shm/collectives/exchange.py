"""The frame of the calls in which every member has something for every other one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.errors import HeaderMismatchError
from transport.native import core
from transport.operands.reduce_op import Flat
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

    def prepare(self, size: int) -> Shape:
        """Return what there is for ``size`` members; nothing else is asked before."""
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
        plan = self.plan(parts)
        board = self._board
        places = None
        if met:
            parts.keep()
        else:
            board.begin(call)
            if placed and plan.laps > 1:
                places = self.locate(parts)
            self._enter(call, parts, plan, places)
        first, laps = 1, plan.laps
        if places is not None or not self._agrees(plan):
            laps = self._compare(call, plan)
            everywhere = [self.is_placed(peer) for peer in range(board.size)]
            if all(everywhere):
                self._run_in_place(call, parts, plan)
                return
            if any(everywhere):
                first = 2
                if places is not None:
                    self.stage(call, parts, plan, 0, 2)
                else:
                    board.publish(2)
        for lap in range(laps):
            # The block that this overwrites was read before its readers published the step before.
            if lap + 1 < laps:
                self.stage(call, parts, plan, lap + 1, first + lap + 1)
            board.reach_all(call, first + lap)
            if lap < plan.laps:
                parts.take(plan.incoming(lap, board.slot(lap)), lap * plan.per_lap)
        if laps > 1:
            board.close()

    def _enter(
        self, call: Call, parts: Parts, plan: ExchangePlan, places: list[int] | None
    ) -> None:
        """Show what this member has, ``places`` or lap 0; return when all members have done so."""
        board = self._board
        self.note(plan, places)
        if places is None:
            self.stage(call, parts, plan, 0, 1)
        else:
            board.publish(1)
        parts.keep()
        board.meet(call)

    def plan(self, parts: Parts) -> ExchangePlan:
        """Return how calls with such ``parts`` go."""
        shape = parts.prepare(self._board.size)
        plan = self._plans.get(shape)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[shape] = ExchangePlan(self._board, shape)
        return plan

    def note(self, plan: ExchangePlan, places: list[int] | None) -> None:
        """Write on this member's card what it has, and where (None: it is staged)."""
        board, notes = self._board, plan.notes
        if places is not None:
            notes = pack_notes(1, plan.laps, plan.shape.sends, plan.shape.expects, places)
        at = board.notes(board.rank) * WORD
        self._memory[at : at + len(notes)] = notes

    def stage(self, call: Call, parts: Parts, plan: ExchangePlan, lap: int, step: int) -> None:
        """Write ``lap`` of what this member has into its block, and publish ``step``."""
        board = self._board
        slot = board.claim(call, lap)
        if lap < plan.laps:
            for into, peer, start, stop in plan.outgoing(lap, slot):
                parts.stage(into, peer, start, stop)
        board.publish(step)

    def locate(self, parts: Parts) -> list[int] | None:
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
            self._take_in_place(parts, plan)
        else:
            self._copy_in_place(parts.outputs)
        self._board.publish(2)
        self._board.reach_all(call, 2)

    def _place(self, peer: int) -> int:
        """Return where ``peer`` has what is for this member."""
        board = self._board
        at = board.notes(peer) + _FIRST_LIST + 2 * board.size + board.rank
        return board.words[at]

    def is_placed(self, peer: int) -> bool:
        """Whether ``peer`` has its parts read where they are."""
        return bool(self._board.words[self._board.notes(peer) + _PLACED])

    def fetch(self, peer: int, into: Flat, *, alone: bool = False) -> None:
        """Copy what ``peer`` has for this member from where it is; ``alone``: see ``Places``."""
        self.places.fetch(peer, self._place(peer), into, alone=alone)

    def view(self, plan: ExchangePlan, peer: int) -> Flat:
        """Return what ``peer`` has for this member, where it is: in symmetric memory."""
        count = plan.expected[peer] if peer != self._board.rank else 0
        return self._arena.view(peer, self._place(peer), count, plan.shape.dtype)

    def _copy_in_place(self, outputs: Sequence[Flat]) -> None:
        rank, size = self._board.rank, self._board.size
        for peer in (*range(rank + 1, size), *range(rank)):  # not all from one at a time
            self.fetch(peer, outputs[peer])

    def _take_in_place(self, parts: Parts, plan: ExchangePlan) -> None:
        views = [self.view(plan, peer) for peer in range(self._board.size)]
        step = max(1, self._piece // plan.shape.dtype.itemsize)
        for start in range(0, max(view.size for view in views), step):
            parts.take([view[start : start + step] for view in views], start)

    def _compare(self, call: Call, plan: ExchangePlan) -> int:
        """Return the group's number of laps; raise HeaderMismatchError where sizes disagree."""
        board, laps, sends = self._board, plan.laps, plan.shape.sends
        for peer in board.peers:
            self.expect(call, plan, peer)
            notes = board.notes(peer)
            laps = max(laps, board.words[notes + _LAPS])
            wanted = board.words[notes + _FIRST_LIST + board.size + board.rank]
            if wanted != sends[peer]:
                raise self._mismatch(call, peer, "expects", wanted, f"got {sends[peer]} bytes")
        return laps

    def expect(self, call: Call, plan: ExchangePlan, peer: int) -> None:
        """Raise HeaderMismatchError where ``peer`` sends more or less than is expected from it."""
        board, expected = self._board, plan.shape.expects[peer]
        sent = board.words[board.notes(peer) + _FIRST_LIST + board.rank]
        if sent != expected:
            raise self._mismatch(call, peer, "sent", sent, f"expected {expected}")

    def _mismatch(
        self, call: Call, peer: int, what: str, nbytes: int, other: str
    ) -> HeaderMismatchError:
        name = self._membership.describe(peer)
        text = f"{name} {what} {nbytes} bytes in {call.header}, {other}"
        return HeaderMismatchError(text, peer, call.header, call.header)
