"""Reductions on two levels: first inside each host, then across hosts, then inside again.

Like NCCL and Horovod on several hosts, this cuts the data into slices, the multi-rail scheme of
Thakur, Rabenseifner and Gropp (2005). Each member of a host reduces one slice, and all members
exchange theirs with other hosts at the same time. Data is reduced inside a host before it crosses
the network, in the reduction dtype; floats of 8 and 16 bits are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from transport._calls.call import Call
from transport._hierarchical import sums
from transport._hierarchical.levels import Levels, Selection
from transport._operands.flat import part_bounds, segments_of
from transport._operands.operand import Operand, store
from transport._operands.quiet import quietly
from transport._operands.reduce_op import Flat, ReduceOp, reduction_dtype

# Slots of ``Levels.scratch``.
_LOADED, _OWN, _PACKED, _PORTION, _ROUNDED = range(5)


class Reductions(Levels):
    """The collectives that reduce."""

    @quietly
    def all_reduce(self, call: Call, buffer: Flat, op: ReduceOp) -> None:
        if reduction_dtype(buffer.dtype) == buffer.dtype and self.one_tree:
            op.prepare(buffer)
            self._all_reduce(call, buffer, buffer, op)
            return
        operand = Operand(self.scratch, op, buffer.dtype, _LOADED)
        for start, stop in self.chunks(buffer.size, operand.dtype.itemsize):
            part = op.part(start, stop, buffer.size) if op.residual is not None else op
            self._all_reduce(call, operand.load(buffer, start, stop), buffer[start:stop], part)

    def _all_reduce(self, call: Call, total: Flat, result: Flat, op: ReduceOp) -> None:
        """Write the sum of the prepared ``total`` to ``result``, which may be ``total``."""
        inside = self.inside
        slices = self.slices(total.nbytes)
        one = sums.one_sum_each(self, total.nbytes // slices, total.dtype, op)
        totals = self.cut(total, slices)
        results = totals if result is total else self.cut(result, slices)
        own = self.index
        found = sums.scatter_inside(self, call, totals[own], totals, op, one)
        if own < slices:
            if op.residual is not None:
                op = op.part(*part_bounds(total.size, slices, own), total.size)
            self._all_reduce_across(self.across(own), call, found, results[own], op, one)
        inside.all_gather(call, results, results[own])

    def _all_reduce_across(
        self,
        across: Selection,
        call: Call,
        total: Flat,
        result: Flat,
        op: ReduceOp,
        one: bool,
    ) -> None:
        if not one:
            sums.all_reduce_across(self, across, call, total, result, op)
            return
        same = result.dtype == total.dtype
        small = total.nbytes <= across.table.all_reduce_doubling
        if same or small or across.compression is not None:
            across.all_reduce(call, total, op.plain)
            op.finish(total, self.size)
            if not same:
                store(result, total)
            return
        # Rounding the sum before the all-gather makes its frames smaller.
        bounds = [part_bounds(total.size, across.size, host) for host in range(across.size)]
        totals = [total[start:stop] for start, stop in bounds]
        results = [result[start:stop] for start, stop in bounds]
        own = across.rank
        across.reduce_scatter(call, totals[own], totals, op.plain)
        op.finish(totals[own], self.size)
        store(results[own], totals[own])
        across.all_gather(call, results, results[own])

    @quietly
    def reduce(self, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
        operand = Operand(self.scratch, op, buffer.dtype, _LOADED)
        for start, stop in self.chunks(buffer.size, operand.dtype.itemsize):
            self._reduce(call, operand.load(buffer, start, stop), buffer[start:stop], op, root)

    def _reduce(self, call: Call, own: Flat, result: Flat, op: ReduceOp, root: int) -> None:
        index, slices = self.index, self.slices(own.nbytes)
        parts = self.cut(own, slices)
        total = self.scratch.flat(_OWN, own.dtype, parts[index].size)
        total = sums.scatter_inside(self, call, total, parts, op, self.one_tree)
        root_host, root_index = self.placement.find(root)
        if index < slices and self.one_tree:
            self.across(index).reduce(call, total, op.plain, root_host)
        elif index < slices:
            total = sums.reduce_across(self, self.across(index), call, total, root_host, op)
        if self.host != root_host:
            return
        op.finish(total, self.size)
        if total.dtype != result.dtype:
            rounded = self.scratch.flat(_ROUNDED, result.dtype, total.size)
            store(rounded, total)
            total = rounded
        results = self.cut(result, slices) if self.rank == root else None
        self.inside.gather(call, results, total, root_index)

    @quietly
    def reduce_scatter(
        self, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
    ) -> None:
        operand = Operand(self.scratch, op, output.dtype, _LOADED)
        total = sum(part.size for part in inputs) * operand.dtype.itemsize
        slices, chunks = self.slices(total), segments_of(total, self.chunk_bytes)
        for chunk in range(chunks):
            bounds = [part_bounds(part.size, chunks, chunk) for part in inputs]
            start, stop = bounds[self.rank]
            self._reduce_blocks(call, operand, output[start:stop], inputs, bounds, op, slices)

    def _reduce_blocks(
        self,
        call: Call,
        operand: Operand,
        result: Flat,
        inputs: Sequence[Flat],
        bounds: Sequence[tuple[int, int]],
        op: ReduceOp,
        slices: int,
    ) -> None:
        """Reduce elements ``bounds[i]`` of ``inputs[i]`` to member i.

        Inputs are packed by the slice that carries them, then by host, then by member.
        """
        index, hosts = self.index, range(len(self.hosts))
        sizes = [stop - start for start, stop in bounds]
        packed = self.scratch.flat(_PACKED, operand.dtype, sum(sizes))
        slice_ends, host_sizes, end = [0], list[int](), 0
        for number in range(slices):
            for host in hosts:
                begin = end
                for member in self.carried(host, slices, number):
                    loaded = operand.load(inputs[member], *bounds[member])
                    np.copyto(packed[end : end + loaded.size], loaded)
                    end += loaded.size
                if number == index:
                    host_sizes.append(end - begin)
            slice_ends.append(end)
        portions = [packed[begin:end] for begin, end in pairwise(slice_ends)]
        portions += [packed[:0]] * (len(self.local) - slices)
        own = self.scratch.flat(_PORTION, operand.dtype, portions[index].size)
        one = sums.one_sum_each(self, packed.nbytes // slices, packed.dtype, op)
        found = sums.scatter_inside(self, call, own, portions, op, one)
        reduced = own[:0]
        if index < slices:
            across, ends = self.across(index), [0, *accumulate(host_sizes)]
            by_host = [own[begin:end] for begin, end in pairwise(ends)]
            reduced = by_host[self.host]
            if one:
                across.reduce_scatter(call, reduced, by_host, op.plain)
            else:
                # ``op.plain``: the member that owns the block calls ``op.finish`` below.
                sums.scatter_across(self, across, call, found, [*pairwise(ends)], reduced, op.plain)
        if slices < len(self.local):
            reduced = self._distribute_blocks(call, reduced, sizes, slices)
        op.finish(reduced, self.size)
        store(result, reduced)

    def _distribute_blocks(
        self, call: Call, reduced: Flat, sizes: Sequence[int], slices: int
    ) -> Flat:
        """Send the members of this host their blocks, which one member has ``reduced``.

        Returns this rank's own block.
        """
        nothing = reduced[:0]
        own = self.scratch.flat(_ROUNDED, reduced.dtype, sizes[self.rank])
        outputs, inputs, end = [nothing] * len(self.local), [nothing] * len(self.local), 0
        for number in range(slices):
            for member in self.carried(self.host, slices, number):
                if member == self.rank:
                    outputs[number] = own
                if number == self.index:
                    place = self.local.index(member)
                    inputs[place] = reduced[end : end + sizes[member]]
                    end += sizes[member]
        self.inside.all_to_all(call, outputs, inputs)
        return own
