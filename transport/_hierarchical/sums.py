"""The sums that cross the network: one for each block of a host's ranks, in the order of addition.

A block is a subtree of the order of addition (``transport._operands.order``) whose ranks are all on
one host. Most hosts' ranks form one block, which is reduced inside the host. If a host has several
blocks, for example with three ranks on each host, its members exchange their inputs and reduce each
block separately. If all hosts' blocks are alike (``Levels.one_tree``), the tree between hosts is
the tree of a group with one rank on each host, and that group reduces the sums. Otherwise hosts
send each other their sums, and each host that needs a result reduces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from transport._algorithms.compressed import compresses
from transport._calls.call import Call
from transport._hierarchical.levels import Levels, Selection
from transport._operands.flat import part_bounds
from transport._operands.operand import store
from transport._operands.order import Subtree, tree_reduce
from transport._operands.reduce_op import Flat, ReduceOp

# Slots of ``Levels.scratch``, after the slots of ``reductions``.
_INSIDE, _BLOCKS, _SENT, _ARRIVED, _TOTAL = range(8, 13)


def one_sum_each(levels: Levels, nbytes: int, dtype: np.dtype[np.generic], op: ReduceOp) -> bool:
    """Return whether a slice of ``nbytes`` has one sum for each host, to be reduced by a group with
    one rank on each host.

    This is so if the hosts form one tree. It is also so if sums cross compressed, because their
    rounding depends on the placement anyway.
    """
    form = levels.whole.compression
    return levels.one_tree or (form is not None and compresses(form, nbytes, dtype, op))


def scatter_inside(
    levels: Levels, call: Call, into: Flat, portions: Sequence[Flat], op: ReduceOp, one: bool
) -> Flat:
    """Return this host's sums of ``portions[levels.index]``: one for each of its blocks, one after
    the other. If ``one`` or there is only one block, return a single sum, in ``into``.
    """
    if one or len(levels.blocks) == 1:
        levels.inside.reduce_scatter(call, into, portions, op.plain)
        return into
    size, count = portions[levels.index].size, len(levels.local)
    memory = levels.scratch.flat(_INSIDE, into.dtype, count * size)
    arrived = [memory[i * size : (i + 1) * size] for i in range(count)]
    levels.inside.all_to_all(call, arrived, portions)
    return _add_blocks(levels, arrived, op)


def _add_blocks(levels: Levels, arrived: Sequence[Flat], op: ReduceOp) -> Flat:
    """Return the sum of each block; ``arrived[i]`` is the input of member i of this host."""
    size, dtype = arrived[0].size, arrived[0].dtype
    sums = levels.scratch.flat(_BLOCKS, dtype, len(levels.blocks) * size)
    begin = 0
    for number, (first, level) in enumerate(levels.blocks):
        end = begin + min(1 << level, levels.size - first)
        out = sums[number * size : (number + 1) * size]
        tree_reduce(levels.scratch, op.plain, arrived[begin:end], out)
        begin = end
    return sums


def all_reduce_across(
    levels: Levels, across: Selection, call: Call, sums: Flat, result: Flat, op: ReduceOp
) -> None:
    """Reduce the ``sums`` of all hosts' blocks into ``result`` on every host."""
    if result.size * sums.itemsize <= across.table.all_reduce_doubling:
        arrived, rows = _receive_buffers(levels, result.size, sums.dtype)
        across.all_gather(call, arrived, sums)
        _finish(levels, rows, result, op)
        return
    bounds = [part_bounds(result.size, across.size, host) for host in range(across.size)]
    results = [result[slice(*bound)] for bound in bounds]
    own = across.rank
    scatter_across(levels, across, call, sums, bounds, results[own], op)
    across.all_gather(call, results, results[own])


def scatter_across(
    levels: Levels,
    across: Selection,
    call: Call,
    sums: Flat,
    bounds: Sequence[tuple[int, int]],
    result: Flat,
    op: ReduceOp,
) -> None:
    """Reduce elements ``bounds[h]`` of the ``sums`` of all hosts' blocks into ``result`` on host
    h.
    """
    size = len(sums) // len(levels.blocks)
    rows = [sums[begin : begin + size] for begin in range(0, len(sums), size or 1)]
    if len(rows) == 1:
        sent = [sums[start:stop] for start, stop in bounds]
    else:
        packed = levels.scratch.flat(_SENT, sums.dtype, sums.size)
        ends = [0, *accumulate(len(rows) * (stop - start) for start, stop in bounds)]
        sent = [packed[begin:end] for begin, end in pairwise(ends)]
        for part, (start, stop) in zip(sent, bounds, strict=True):
            for number, row in enumerate(rows):
                width = stop - start
                np.copyto(part[number * width : (number + 1) * width], row[start:stop])
    arrived, found = _receive_buffers(levels, result.size, sums.dtype)
    across.all_to_all(call, arrived, sent)
    _finish(levels, found, result, op)


def reduce_across(
    levels: Levels, across: Selection, call: Call, sums: Flat, host: int, op: ReduceOp
) -> Flat:
    """Return, on ``host``, the total of the ``sums`` of all hosts' blocks, in their dtype and
    without ``op.finish``. Other hosts get an empty array.
    """
    if across.rank != host:
        across.gather(call, None, sums, host)
        return sums[:0]
    size = len(sums) // len(levels.blocks)
    arrived, rows = _receive_buffers(levels, size, sums.dtype)
    across.gather(call, arrived, sums, host)
    total = levels.scratch.flat(_TOTAL, sums.dtype, size)
    tree_reduce(levels.scratch, op.plain, rows, total, levels.all_blocks)
    return total


def _receive_buffers(
    levels: Levels, size: int, dtype: np.dtype[np.generic]
) -> tuple[list[Flat], list[Flat]]:
    """Return receive buffers by host, with a row of ``size`` elements for each of its blocks; and
    all rows in the order of the blocks.
    """
    memory = levels.scratch.flat(_ARRIVED, dtype, len(levels.all_blocks) * size)
    arrived, rows, begin = list[Flat](), dict[Subtree, Flat](), 0
    for blocks in levels.blocks_by_host:
        arrived.append(memory[begin : begin + len(blocks) * size])
        for block in blocks:
            rows[block] = memory[begin : begin + size]
            begin += size
    return arrived, [rows[block] for block in levels.all_blocks]


def _finish(levels: Levels, rows: Sequence[Flat], result: Flat, op: ReduceOp) -> None:
    total = result
    if result.dtype != rows[0].dtype:
        total = levels.scratch.flat(_TOTAL, rows[0].dtype, result.size)
    tree_reduce(levels.scratch, op.plain, rows, total, levels.all_blocks)
    op.finish(total, levels.size)
    if total is not result:
        store(result, total)
