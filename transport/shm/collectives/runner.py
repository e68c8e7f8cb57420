"""Has plans run: by the compiled core where that can, by NumPy's interpreter otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.native import core
from transport.operands.folding import Folding
from transport.operands.reduce_op import Flat, ReduceOp
from transport.shm.board.board import Board
from transport.shm.collectives.interpreter import Interpreter
from transport.shm.collectives.places import Places
from transport.shm.collectives.planning import Planner
from transport.shm.collectives.steps import Plan


class Runner:
    """The planned calls of one member of a group of at least two. One thread at a time.

    The core keeps its own plans: to look one up here takes longer than to run a short one there.
    ``piece`` (bytes) is how much is worked on at a time so that it stays in a core's cache.
    """

    def __init__(self, board: Board, membership: Membership, places: Places, piece: int) -> None:
        self._planner = Planner(board.layout, board.rank, piece)
        self._size = board.size
        self._places, self._arena = places, places.arena
        self._interpreter = Interpreter(
            board, membership, places, Folding(board.size, piece), piece
        )
        self._plans: dict[int, Plan] = {}
        self.compiled: Any = None
        if core is not None and board.compiled is not None:
            self.compiled = core.Plans(board.compiled, board, self._pack, self._planner.count)
            self._arena.follower = self.compiled.lay_out

    def run(
        self,
        kind: int,
        root: int,
        call: Call,
        inputs: Sequence[Flat],
        outputs: Sequence[Flat],
        op: ReduceOp | None = None,
    ) -> None:
        """Carry out a call by its plan, with what ``Communicator`` has for a call of that ``Kind``.

        ``root`` is 0 for kinds without one. ``inputs`` are by member or one for all, ``outputs`` by
        member or one; empty where this member has none. What is reduced where it lies is an output.
        """
        number, compiled = kind * self._size + root, self.compiled
        where, start = None, 0
        if not self._arena.empty or (compiled is None and self._places.memory is not None):
            where = self._locate(number, inputs or outputs, op)
        if compiled is not None:
            start = compiled.run(number, call, inputs, outputs, 0 if op is None else op.code, where)
            if start is None:
                return
        arrays = [*inputs, *outputs]
        self._interpreter.run(self._plan(number), call, arrays, op, where, start)

    def _locate(self, number: int, arrays: Sequence[Flat], op: ReduceOp | None) -> list[int] | None:
        """Return the places of what is sent, whose arrays come first; None: it is staged."""
        plan = self._plans.get(number) or self._plan(number)
        # Scaled inputs are not what lies in anybody's memory.
        if not plan.sources or (op is not None and op.factor is not None):
            return None
        # The core stages private arrays in less time than it takes to read them.
        private = op is None and self.compiled is None
        places = self._places.locate(
            [arrays[source] for source in plan.sources], private=private, alone=plan.alone
        )
        if places is None or len(places) == len(arrays):
            return places
        by_array = dict(zip(plan.sources, places, strict=True))
        return [by_array.get(array, 0) for array in range(len(arrays))]

    def _plan(self, number: int) -> Plan:
        plan = self._plans.get(number)
        if plan is None:
            plan = self._plans[number] = self._planner.plan(number)
        return plan

    def _pack(self, number: int) -> bytes:
        return self._plan(number).packed()
