"""The exchanges in which all data is one member's: what it sends to the others, or they send to it.

Who sends shows what there is for each on its card and stages it, a lap at a time, as many ahead as
it has blocks; who receives says after each lap that it is through with it. A sender meets those who
wait for it in its second lap at the latest, and so leaves a call of one lap with nobody waited for.
What lies where others can read it is not staged: its owner stays until it is read.
"""

from __future__ import annotations

from transport.call import Call
from transport.operands.reduce_op import Flat
from transport.shm.board.board import DONE, Board
from transport.shm.board.layout import BLOCKS
from transport.shm.collectives.exchange import Exchange, Parts
from transport.shm.collectives.exchange_plan import ExchangePlan


class Rooted:
    """Carries such calls out for one member. One thread at a time.

    ``peer`` is the member at the other end; None: all others. ``even``: the call's header tells
    the size of what is sent, so that all know how many laps each has.
    """

    def __init__(self, board: Board, exchange: Exchange) -> None:
        self._board = board
        self._exchange = exchange

    def send(
        self,
        call: Call,
        parts: Parts,
        peer: int | None,
        *,
        even: bool = False,
        placed: bool = True,
    ) -> None:
        """Send ``parts``. ``placed``: false where none must be read before it is staged."""
        board, exchange = self._board, self._exchange
        plan = exchange.plan(parts)
        board.begin(call)
        places = exchange.locate(parts) if placed and plan.laps > 1 else None
        exchange.note(plan, places)
        if places is not None:
            board.publish(1)
            parts.keep()
            self._meet(call, peer)
            self._reach(call, peer, DONE)
        else:
            for lap in range(plan.laps):
                if lap == 1:
                    self._meet(call, peer)
                if lap >= BLOCKS:
                    self._reach(call, peer, lap - BLOCKS + 2)
                exchange.stage(call, parts, plan, lap, lap + 1)
            parts.keep()
        self._end(call, plan, even)

    def receive(
        self, call: Call, parts: Parts, peer: int | None, *, even: bool = False, alone: bool = False
    ) -> None:
        """Receive ``parts``. ``alone``: no other member receives anything."""
        board, exchange = self._board, self._exchange
        plan = exchange.plan(parts)
        board.begin(call)
        board.publish(1)
        parts.keep()
        self._meet(call, peer)
        staged: list[int] = []
        placed: list[int] = []
        for sender in board.peers if peer is None else (peer,):
            exchange.expect(call, plan, sender)
            (placed if exchange.is_placed(sender) else staged).append(sender)
        outputs = parts.outputs
        views: dict[int, Flat] = {}
        if outputs is None:
            views = {sender: exchange.view(plan, sender) for sender in placed}
        for lap in range(plan.laps if staged or views else 0):
            if lap:
                board.publish(lap + 1)
                for sender in staged:
                    board.reach(call, sender, lap + 1)
            arrived = plan.incoming(lap, board.slot(lap))
            start = lap * plan.per_lap
            if placed:
                arrived = list(arrived)
                for sender in placed:
                    view = views.get(sender)
                    stop = start + plan.per_lap
                    arrived[sender] = arrived[sender][:0] if view is None else view[start:stop]
            parts.take(arrived, start)
        if outputs is not None:
            for sender in placed:
                exchange.fetch(sender, outputs[sender], alone=alone)
        self._end(call, plan, even, met=peer is None)

    def _meet(self, call: Call, peer: int | None) -> None:
        if peer is None:
            self._board.meet(call)
        else:
            self._board.meet_one(call, peer)

    def _reach(self, call: Call, peer: int | None, step: int) -> None:
        if peer is None:
            self._board.reach_all(call, step)
        else:
            self._board.reach(call, peer, step)

    def _end(self, call: Call, plan: ExchangePlan, even: bool, *, met: bool = False) -> None:
        board = self._board
        if not met:  # else all cards are compared
            board.check_later(call)
        if plan.laps > 1 or not even:
            board.close()
