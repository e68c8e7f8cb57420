"""The calls that only copy, through the board."""

from __future__ import annotations

from collections.abc import Sequence

from transport.call import Call
from transport.operands.reduce_op import Flat
from transport.shm.board.board import Board
from transport.shm.plans.planning import Kind
from transport.shm.plans.runner import Runner


class Copies:
    """The copying calls of one member of a group of at least two. One thread at a time."""

    def __init__(self, board: Board, runner: Runner) -> None:
        self._board = board
        self._run = runner.run
        self._rank = board.rank

    def barrier(self, call: Call) -> None:
        """See ``Communicator.barrier``."""
        board = self._board
        board.begin(call)
        board.publish(1)
        board.meet(call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        """See ``Communicator.broadcast``."""
        inputs, outputs = ([buffer], ()) if root == self._rank else ((), [buffer])
        self._run(Kind.BROADCAST, call, inputs, outputs, root=root)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        """See ``Communicator.all_gather``."""
        self._run(Kind.ALL_GATHER, call, [input_], outputs)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        """See ``Communicator.all_to_all``."""
        self._run(Kind.ALL_TO_ALL, call, inputs, outputs)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        """See ``Communicator.gather``."""
        self._run(Kind.GATHER, call, [input_], outputs or (), root=root)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        """See ``Communicator.scatter``."""
        self._run(Kind.SCATTER, call, inputs or (), [output], root=root)
