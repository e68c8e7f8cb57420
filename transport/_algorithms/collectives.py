"""All collectives, over the links between the members of a group."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from transport._algorithms import compressed, copies, halving, pairwise, star, tree
from transport._algorithms.team import Team
from transport._calls.call import Call
from transport._choosing.choice import ROUND_BYTES, Algorithm
from transport._choosing.peers import peers_of
from transport._communicators.base import BufferCollectives
from transport._link import Request, wait_all
from transport._operands.compression import Compression
from transport._operands.flat import copy, part_bounds, segments_of
from transport._operands.operand import REDUCED, WHOLE, Operand, pack, store
from transport._operands.quiet import quietly
from transport._operands.reduce_op import Flat, RedOpType, ReduceOp, reduction_dtype

_AllReduce = Callable[[Team, Call, Flat, ReduceOp], None]
_WHOLE_BUFFER: dict[Algorithm, _AllReduce] = {
    Algorithm.STAR: star.all_reduce,
    Algorithm.DOUBLING: tree.doubling_all_reduce,
    Algorithm.TREE: tree.all_reduce,
}
"""The algorithms that reduce a whole buffer at once. They leave ``op.prepare`` and ``op.finish`` to
the caller.
"""


class LinkCollectives(BufferCollectives, Team):
    """The collectives of a group, over the links that ``link`` returns.

    ``table`` chooses the algorithms and must be equal on all members. ``scratch`` is working
    memory; instances that never run at the same time may share it.
    """

    compression: Compression | None = None
    """The format of large reductions; None: uncompressed."""
    _prepared: frozenset[Algorithm | tuple[Algorithm, int]] = frozenset()

    @abstractmethod
    def check_open(self) -> None:
        """Raise ``CommunicatorAbortedError`` after an abort."""

    def _end(self, call: Call, requests: Sequence[Request]) -> None:
        """Wait for the last frames of a call."""
        del call
        wait_all(requests)

    def _prepare(self, algorithm: Algorithm, call: Call, root: int | None = None) -> None:
        """Open the links that ``algorithm`` needs, all at once, before its first use.

        With ``root``, they are opened once for each root, because the peers depend on it.
        """
        key = algorithm if root is None else (algorithm, root)
        if key in self._prepared:
            return
        self._prepared |= {key}
        peers = peers_of(algorithm, self.rank, self.size, root or 0)
        if len(peers) > 1:
            self.reach(peers, call)

    def barrier(self, call: Call) -> None:
        self.check_open()
        algorithm = self.table.barrier(self.size)
        if algorithm not in self._prepared:
            self._prepare(algorithm, call)
        if algorithm is Algorithm.STAR:
            star.barrier(self, call)
        else:
            copies.dissemination_barrier(self, call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        self.check_open()
        algorithm = self.table.broadcast(buffer.nbytes, self.size)
        self._prepare(algorithm, call, root)
        chains = algorithm is Algorithm.CHAIN
        (copies.chain_broadcast if chains else tree.broadcast)(self, call, buffer, root)

    @quietly
    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        self.check_open()
        form = self.compression
        if form is not None and compressed.compresses(form, buffer.nbytes, buffer.dtype, op):
            self._prepare(Algorithm.PAIRWISE, call)
            compressed.all_reduce(self, call, buffer, op, form)
            return
        narrow = reduction_dtype(buffer.dtype) != buffer.dtype
        algorithm = self.table.all_reduce(buffer.nbytes, self.size, narrow)
        if algorithm not in self._prepared:
            self._prepare(algorithm, call)
        reduce_whole = _WHOLE_BUFFER.get(algorithm)
        if call.rest is not None and (reduce_whole or algorithm is Algorithm.HALVING):
            call.rest.end_before()
        if reduce_whole is not None:
            self._all_reduce_whole(reduce_whole, call, buffer, op, narrow)
        elif narrow:
            self._end(call, pairwise.all_reduce(self, call, buffer, op))
        else:
            op.prepare(buffer)
            if op.kind is RedOpType.PREMUL_SUM:
                op = ReduceOp.SUM
            if algorithm is Algorithm.PAIRWISE:
                self._end(call, pairwise.all_reduce(self, call, buffer, op))
            else:
                halving.all_reduce(self, call, buffer, op)

    def _all_reduce_whole(
        self, reduce: _AllReduce, call: Call, buffer: Flat, op: ReduceOp, narrow: bool
    ) -> None:
        """Reduce all of ``buffer`` at once by ``reduce``, one of ``_WHOLE_BUFFER``."""
        if narrow:
            operand = Operand(self.scratch, op, buffer.dtype, WHOLE)
            total = operand.load(buffer, 0, buffer.size)
        else:
            total = buffer
            op.prepare(total)
        reduce(self, call, total, op)
        op.finish(total, self.size)
        if narrow:
            store(buffer, total)

    @quietly
    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        self.check_open()
        if self.table.reduce(buffer.nbytes, self.size) is Algorithm.TREE:
            self._prepare(Algorithm.TREE, call, root)
            tree.reduce(self, call, buffer, op, root)
        else:
            self._reduce_parts(call, buffer, op, root)

    def _reduce_parts(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        """Reduce a part of ``buffer`` on each member, and gather the parts on ``root``."""
        scaled = op.kind is RedOpType.PREMUL_SUM
        operand = Operand(self.scratch, op, buffer.dtype, WHOLE)
        rounds = segments_of(buffer.nbytes, ROUND_BYTES if scaled else ROUND_BYTES * self.size)
        for number in range(rounds):
            start, stop = part_bounds(buffer.size, rounds, number)
            data = operand.load(buffer, start, stop) if scaled else buffer[start:stop]
            bounds = [part_bounds(data.size, self.size, member) for member in range(self.size)]
            parts = [data[slice(*bound)] for bound in bounds]
            own = self.scratch.flat(REDUCED, data.dtype, parts[self.rank].size)
            self._scatter_sums(call, own, parts, ReduceOp.SUM if scaled else op)
            self._prepare(Algorithm.DIRECT, call, root)
            copies.gather(self, call, parts if self.rank == root else None, own, root)
            if scaled and self.rank == root:
                store(buffer[start:stop], data)

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        self.check_open()
        copy(outputs[self.rank], input_)
        total = sum(output.nbytes for output in outputs)
        algorithm = self.table.all_gather(total, self.size)
        if algorithm not in self._prepared:
            self._prepare(algorithm, call)
        if call.rest is not None and algorithm is not Algorithm.PAIRWISE:
            call.rest.end_before()
        match algorithm:
            case Algorithm.STAR:
                star.all_gather(self, call, outputs)
            case Algorithm.BRUCK:
                copies.bruck_all_gather(self, call, outputs)
            case Algorithm.PAIRWISE:
                self._end(call, pairwise.all_gather(self, call, outputs))
            case _:
                copies.ring_all_gather(self, call, outputs)

    @quietly
    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        self.check_open()
        total = sum(part.nbytes for part in inputs)
        form = self.compression
        if form is not None and compressed.compresses(form, total, output.dtype, op):
            self._prepare(Algorithm.PAIRWISE, call)
            compressed.reduce_scatter(self, call, output, inputs, op, form)
        else:
            self._scatter_sums(call, output, inputs, op)

    def _scatter_sums(self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp) -> None:
        total = sum(part.nbytes for part in inputs)
        narrow = reduction_dtype(output.dtype) != output.dtype
        algorithm = self.table.reduce_scatter(total, self.size, narrow)
        if algorithm not in self._prepared:
            self._prepare(algorithm, call)
        match algorithm:
            case Algorithm.STAR:
                star.reduce_scatter(self, call, output, inputs, op)
            case Algorithm.PAIRWISE:
                wait_all(pairwise.reduce_scatter(self, call, output, inputs, op))
            case Algorithm.HALVING:
                halving.reduce_scatter(self, call, output, inputs, op)
            case _:
                whole, parts = pack(self.scratch, op, inputs)
                _WHOLE_BUFFER[algorithm](self, call, whole, op)
                op.finish(parts[self.rank], self.size)
                store(output, parts[self.rank])

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        self.check_open()
        self._prepare(Algorithm.DIRECT, call, root)
        copies.gather(self, call, outputs, input_, root)

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        self.check_open()
        self._prepare(Algorithm.DIRECT, call, root)
        copies.scatter(self, call, output, inputs, root)

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        self.check_open()
        if Algorithm.PAIRWISE not in self._prepared:
            self._prepare(Algorithm.PAIRWISE, call)
        self._end(call, pairwise.all_to_all(self, call, outputs, inputs))
