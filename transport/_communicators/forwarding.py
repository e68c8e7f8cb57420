"""Collectives that are handed on to others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from transport._call import Call
from transport._communicators.base import Collectives
from transport._operands.reduce_op import Flat, ReduceOp


class Forwarding(Collectives):
    """The collectives of one who has others carry them out, and says once how they get there."""

    @abstractmethod
    def _hand_on(self, call: Call, collective: str, *arguments: Any) -> None:
        """Call ``collective`` with ``arguments`` on the responsible communicator."""

    def barrier(self, call: Call) -> None:
        self._hand_on(call, "barrier")

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        self._hand_on(call, "broadcast", buffer, root)

    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        self._hand_on(call, "all_reduce", buffer, op)

    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        self._hand_on(call, "reduce", buffer, op, root)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        self._hand_on(call, "all_gather", outputs, input_)

    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self._hand_on(call, "reduce_scatter", output, inputs, op)

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        self._hand_on(call, "gather", outputs, input_, root)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        self._hand_on(call, "scatter", output, inputs, root)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        self._hand_on(call, "all_to_all", outputs, inputs)
