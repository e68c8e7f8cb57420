"""What a reduce_scatter or a reduce does with what its exchange brings."""

from __future__ import annotations

from collections.abc import Sequence

from transport.operands.copying import address
from transport.operands.folding import Folding
from transport.operands.reduce_op import Flat, ReduceOp
from transport.shm.collectives.exchange_plan import Shape


class Reduced:
    """The parts of a reduction into ``output``, in rank order as they arrive.

    ``inputs`` are by member; one is the same for all. ``root``: who alone gets a result (None: all
    do); ``share`` is as in ``Shape``.
    """

    outputs = None

    def __init__(
        self,
        folding: Folding,
        rank: int,
        output: Flat,
        inputs: Sequence[Flat],
        op: ReduceOp,
        share: int,
        root: int | None = None,
    ) -> None:
        self._folding = folding
        self._rank = rank
        self._output = output
        self._inputs = inputs
        self._op = op
        self._share = share
        self._root = root
        self._same = len(inputs) == 1
        self._in_place = False

    def prepare(self, size: int) -> Shape:
        output, own = self._output, self._own
        # Folding must know whether it writes over a part that it still needs.
        self._in_place = self._op.factor is None and (
            own is output or address(own) == address(output)
        )
        staged = self._folding.staged_dtype(output.dtype, self._op)
        if self._root is None:
            sends = tuple([input_.nbytes for input_ in self._inputs])
            expects = (output.nbytes,) * size
        else:
            mine = (output.nbytes,) * size
            sends, expects = (
                ((0,) * size, mine) if self._root == self._rank else (mine, (0,) * size)
            )
        return Shape(staged, output.itemsize, self._same, self._share, sends, expects)

    @property
    def _own(self) -> Flat:
        return self._inputs[0 if self._same else self._rank]

    def sources(self) -> Sequence[Flat]:
        return self._inputs

    def stage(self, into: Flat, peer: int, start: int, stop: int) -> None:
        self._folding.stage(into, self._inputs[0 if self._same else peer], start, stop, self._op)

    def keep(self) -> None:
        pass

    def take(self, arrived: Sequence[Flat], start: int) -> None:
        parts = list(arrived)
        # Another member's is as long as this one's would be, which is empty.
        stop = start + parts[self._rank - 1].size
        if start == stop:
            return
        out = self._output[start:stop]
        if self._in_place:
            parts[self._rank] = out
        else:
            parts[self._rank] = self._folding.load(self._own, start, stop, self._op)
        self._folding.fold(parts, self._op, out)
