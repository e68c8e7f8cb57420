"""The calls that only copy, through the board."""

from __future__ import annotations

from collections.abc import Sequence

from transport.call import Call
from transport.operands.reduce_op import Flat
from transport.shm.board.board import Board
from transport.shm.collectives.planning import Kind
from transport.shm.collectives.runner import Runner


class Copies:
    """The copying calls of one member of a group of at least two. One thread at a time."""

    def __init__(self, board: Board, runner: Runner) -> None:
        self._board = board
        self._run = runner.run
        self._rank = board.rank
        # To look a member of an enumeration up takes a tenth of a microsecond.
        self._all_gather = runner.number(Kind.ALL_GATHER)
        self._all_to_all = runner.number(Kind.ALL_TO_ALL)
        # The first root's; the others' come next.
        self._broadcast = runner.number(Kind.BROADCAST)
        self._gather = runner.number(Kind.GATHER)
        self._scatter = runner.number(Kind.SCATTER)

    def barrier(self, call: Call) -> None:
        """See ``Communicator.barrier``."""
        board = self._board
        board.begin(call)
        board.publish(1)
        board.meet(call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        """See ``Communicator.broadcast``."""
        inputs, outputs = ([buffer], ()) if root == self._rank else ((), [buffer])
        self._run(self._broadcast + root, call, inputs, outputs)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        """See ``Communicator.all_gather``."""
        self._run(self._all_gather, call, [input_], outputs)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        """See ``Communicator.all_to_all``."""
        self._run(self._all_to_all, call, inputs, outputs)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        """See ``Communicator.gather``."""
        self._run(self._gather + root, call, [input_], outputs or ())

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        """See ``Communicator.scatter``."""
        self._run(self._scatter + root, call, inputs or (), [output])
