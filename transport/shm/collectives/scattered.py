"""What a reduce_scatter does with what its exchange brings."""

from __future__ import annotations

from collections.abc import Sequence

from transport.reduce_op import Flat, ReduceOp
from transport.shm.collectives.copying import address
from transport.shm.collectives.exchange_plan import Shape
from transport.shm.collectives.folding import Folding


class Scattered:
    """The parts of a reduce_scatter, reduced as they arrive."""

    def __init__(
        self, folding: Folding, rank: int, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self._folding = folding
        self._rank = rank
        self._output = output
        self._inputs = inputs
        self._op = op
        self.outputs = None
        self._in_place = False

    def prepare(self) -> Shape:  # noqa: D102
        output, own = self._output, self._inputs[self._rank]
        # Folding must know whether it writes over a part that it still needs.
        self._in_place = self._op.factor is None and address(own) == address(output)
        staged = self._folding.staged_dtype(output.dtype, self._op)
        sends = tuple([input_.nbytes for input_ in self._inputs])
        return Shape(staged, output.itemsize, False, sends, (output.nbytes,) * len(sends))

    def sources(self) -> Sequence[Flat]:  # noqa: D102
        return self._inputs

    def stage(self, into: Flat, peer: int, start: int, stop: int) -> None:  # noqa: D102
        self._folding.stage(into, self._inputs[peer], start, stop, self._op)

    def keep(self) -> None:  # noqa: D102
        pass

    def take(self, arrived: Sequence[Flat], start: int) -> None:  # noqa: D102
        parts = list(arrived)
        # Another member's is as long as this one's would be, which is empty.
        stop = start + parts[self._rank - 1].size
        if start == stop:
            return
        out, own = self._output[start:stop], self._inputs[self._rank]
        if self._in_place:
            parts[self._rank] = out
        else:
            parts[self._rank] = self._folding.load(own, start, stop, self._op)
        self._folding.fold(parts, self._op, out)
