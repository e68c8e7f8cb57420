"""Reductions on two levels: first inside each host, then across, then inside again.

With slices, after the multi-rail scheme of Thakur, Rabenseifner and Gropp (2005) and what NCCL
and Horovod do on several hosts: the members of a host reduce a slice each, and all of them talk
to other hosts at the same time. What crosses the network has been reduced inside a host, in the
reduction dtype: floats of 8 and 16 bits are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from transport._call import Call
from transport._hierarchical import sums
from transport._hierarchical.levels import Levels, Selection
from transport._operands.flat import part_bounds, segments_of
from transport._operands.operand import Operand, store
from transport._operands.reduce_op import Flat, ReduceOp, reduction_dtype

# Slots of ``Levels.scratch``.
_LOADED, _OWN, _PACKED, _MINE, _ROUNDED = range(5)


def all_reduce(levels: Levels, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place."""
    if reduction_dtype(buffer.dtype) == buffer.dtype and levels.one_tree:
        op.prepare(buffer)
        _all_reduce(levels, call, buffer, buffer, op)
        return
    operand = Operand(levels.scratch, op, buffer.dtype, _LOADED)
    for start, stop in _laps(levels, buffer.size, operand.dtype.itemsize):
        part = op.part(start, stop, buffer.size) if op.residual is not None else op
        _all_reduce(levels, call, operand.load(buffer, start, stop), buffer[start:stop], part)


def _all_reduce(levels: Levels, call: Call, total: Flat, result: Flat, op: ReduceOp) -> None:
    """Reduce ``total``, prepared already, and put it into ``result``: itself, or a narrower one."""
    inside = levels.inside
    slices = levels.slices(total.nbytes)
    one = sums.have_one(levels, total.nbytes // slices, total.dtype, op)
    if slices == 1:
        found = sums.reduce_inside(levels, call, total, op, 0, one)
        if levels.index == 0:
            _all_reduce_across(levels, levels.across(0), call, found, result, op, one)
        inside.broadcast(call, result, 0)
        return
    totals = levels.cut(total, slices)
    results = totals if result is total else levels.cut(result, slices)
    own = levels.index
    found = sums.scatter_inside(levels, call, totals[own], totals, op, one)
    if own < slices:
        if op.residual is not None:
            op = op.part(*part_bounds(total.size, slices, own), total.size)
        _all_reduce_across(levels, levels.across(own), call, found, results[own], op, one)
    inside.all_gather(call, results, results[own])


def _all_reduce_across(
    levels: Levels,
    across: Selection,
    call: Call,
    total: Flat,
    result: Flat,
    op: ReduceOp,
    one: bool,
) -> None:
    if not one:
        sums.all_reduce_across(levels, across, call, total, result, op)
        return
    same = result.dtype == total.dtype
    small = total.nbytes <= across.table.all_reduce_doubling
    if same or small or across.compression is not None:
        across.all_reduce(call, total, op.plain)
        op.finish(total, levels.size)
        if not same:
            store(result, total)
        return
    # Rounded before it is gathered: half of the way, narrow data travels.
    bounds = [part_bounds(total.size, across.size, host) for host in range(across.size)]
    totals = [total[start:stop] for start, stop in bounds]
    results = [result[start:stop] for start, stop in bounds]
    own = across.rank
    across.reduce_scatter(call, totals[own], totals, op.plain)
    op.finish(totals[own], levels.size)
    store(results[own], totals[own])
    across.all_gather(call, results, results[own])


def reduce(levels: Levels, call: Call, buffer: Flat, op: ReduceOp, root: int) -> None:
    """Reduce into ``root``'s ``buffer``; the others' stay as they were."""
    operand = Operand(levels.scratch, op, buffer.dtype, _LOADED)
    for start, stop in _laps(levels, buffer.size, operand.dtype.itemsize):
        own = operand.load(buffer, start, stop)
        slices = levels.slices(own.nbytes)
        if slices == 1:
            _reduce_whole(levels, call, own, buffer[start:stop], op, root)
        else:
            _reduce_slices(levels, call, own, buffer[start:stop], op, root, slices)


def _reduce_whole(
    levels: Levels, call: Call, own: Flat, result: Flat, op: ReduceOp, root: int
) -> None:
    speaker = levels.speaker(root)
    total = own
    if levels.index == speaker:
        total = levels.scratch.flat(_OWN, own.dtype, own.size)
        np.copyto(total, own)
    found = sums.reduce_inside(levels, call, total, op, speaker, levels.one_tree)
    if levels.index == speaker:
        found = _reduce_across(levels, levels.across_with(root), call, found, root, op)
    if levels.rank == root:
        op.finish(found, levels.size)
        store(result, found)


def _reduce_across(
    levels: Levels, across: Selection, call: Call, total: Flat, root: int, op: ReduceOp
) -> Flat:
    root_host, _ = levels.placement.find(root)
    if not levels.one_tree:
        return sums.reduce_across(levels, across, call, total, root_host, op)
    across.reduce(call, total, op.plain, root_host)
    return total


def _reduce_slices(
    levels: Levels, call: Call, own: Flat, result: Flat, op: ReduceOp, root: int, slices: int
) -> None:
    index = levels.index
    parts = levels.cut(own, slices)
    total = levels.scratch.flat(_OWN, own.dtype, parts[index].size)
    total = sums.scatter_inside(levels, call, total, parts, op, levels.one_tree)
    root_host, root_index = levels.placement.find(root)
    if index < slices:
        total = _reduce_across(levels, levels.across(index), call, total, root, op)
    if levels.host != root_host:
        return
    op.finish(total, levels.size)
    if total.dtype != result.dtype:
        rounded = levels.scratch.flat(_ROUNDED, result.dtype, total.size)
        store(rounded, total)
        total = rounded
    results = levels.cut(result, slices) if levels.rank == root else None
    levels.inside.gather(call, results, total, root_index)


def reduce_scatter(
    levels: Levels, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce ``inputs[i]`` to member i's ``output``. Sizes may differ; inputs stay as they were."""
    operand = Operand(levels.scratch, op, output.dtype, _LOADED)
    total = sum(part.size for part in inputs) * operand.dtype.itemsize
    laps = segments_of(total, levels.lap_bytes)
    slices = levels.slices(total)
    for lap in range(laps):
        bounds = [part_bounds(part.size, laps, lap) for part in inputs]
        start, stop = bounds[levels.rank]
        _reduce_blocks(levels, call, operand, output[start:stop], inputs, bounds, op, slices)


def _reduce_blocks(
    levels: Levels,
    call: Call,
    operand: Operand,
    result: Flat,
    inputs: Sequence[Flat],
    bounds: Sequence[tuple[int, int]],
    op: ReduceOp,
    slices: int,
) -> None:
    """Reduce elements ``bounds[i]`` of ``inputs[i]`` to member i, one lap of a reduce_scatter.

    They are packed by the slice that carries them across, then by host, then by member.
    """
    index, hosts = levels.index, range(len(levels.hosts))
    sizes = [stop - start for start, stop in bounds]
    packed = levels.scratch.flat(_PACKED, operand.dtype, sum(sizes))
    slice_ends, host_sizes, end = [0], list[int](), 0
    for number in range(slices):
        for host in hosts:
            begin = end
            for member in levels.carried(host, slices, number):
                loaded = operand.load(inputs[member], *bounds[member])
                np.copyto(packed[end : end + loaded.size], loaded)
                end += loaded.size
            if number == index:
                host_sizes.append(end - begin)
        slice_ends.append(end)
    portions = [packed[begin:end] for begin, end in pairwise(slice_ends)]
    portions += [packed[:0]] * (len(levels.local) - slices)
    mine = levels.scratch.flat(_MINE, operand.dtype, portions[index].size)
    one = sums.have_one(levels, packed.nbytes // slices, packed.dtype, op)
    found = sums.scatter_inside(levels, call, mine, portions, op, one)
    reduced = mine[:0]
    if index < slices:
        across, ends = levels.across(index), [0, *accumulate(host_sizes)]
        by_host = [mine[begin:end] for begin, end in pairwise(ends)]
        reduced = by_host[levels.host]
        if one:
            across.reduce_scatter(call, reduced, by_host, op.plain)
        else:
            # Finished where it belongs.
            sums.scatter_across(levels, across, call, found, [*pairwise(ends)], reduced, op.plain)
    if slices < len(levels.local):
        reduced = _hand_over(levels, call, reduced, sizes, slices)
    op.finish(reduced, levels.size)
    store(result, reduced)


def _hand_over(
    levels: Levels, call: Call, reduced: Flat, sizes: Sequence[int], slices: int
) -> Flat:
    """Give the members of this host the blocks that one of them has ``reduced`` for them.

    Returns this rank's own.
    """
    nothing = reduced[:0]
    own = levels.scratch.flat(_ROUNDED, reduced.dtype, sizes[levels.rank])
    outputs, inputs, end = [nothing] * len(levels.local), [nothing] * len(levels.local), 0
    for number in range(slices):
        for member in levels.carried(levels.host, slices, number):
            if member == levels.rank:
                outputs[number] = own
            if number == levels.index:
                place = levels.local.index(member)
                inputs[place] = reduced[end : end + sizes[member]]
                end += sizes[member]
    levels.inside.all_to_all(call, outputs, inputs)
    return own


def _laps(levels: Levels, count: int, itemsize: int) -> list[tuple[int, int]]:
    laps = segments_of(count * itemsize, levels.lap_bytes)
    return [part_bounds(count, laps, lap) for lap in range(laps)]
