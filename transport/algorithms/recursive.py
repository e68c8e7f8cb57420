"""Recursive doubling: log2(n) exchanges of everything. Few steps, so best for small data.

After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005). With n not a power of two, the first 2e ranks (e = n - 2^k) fold into e: each even
one gives its data to the odd one above and gets the result at the end. Blocks of ranks that have
been reduced stay contiguous, so operands are combined in rank order, and both partners of an
exchange compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.team import Team
from transport.call import Call
from transport.choosing.peers import doubling_partners
from transport.operands.flat import as_bytes
from transport.operands.operand import ARRIVING, pack, store
from transport.operands.reduce_op import Flat, ReduceOp


def all_reduce(team: Team, call: Call, buffer: Flat, op: ReduceOp) -> None:
    """Reduce the members' ``buffer`` in place; neither prepares nor finishes."""
    folded, partners = doubling_partners(team.rank, team.size)
    arriving = team.scratch.flat(ARRIVING, buffer.dtype, buffer.size)
    mine, theirs = as_bytes(buffer), as_bytes(arriving)
    if folded is not None:
        link = team.link(folded, call)
        if folded > team.rank:
            link.send(call, mine)
            link.recv_into(call, mine)
            return
        link.recv_into(call, theirs)
        op.combine(arriving, buffer, buffer)
    for partner in partners:
        link = team.link(partner, call)
        link.exchange(call, mine, link, theirs)
        if partner < team.rank:
            op.combine(arriving, buffer, buffer)
        else:
            op.combine(buffer, arriving, buffer)
    if folded is not None:
        team.link(folded, call).send(call, mine)


def reduce_scatter(
    team: Team, call: Call, output: Flat, inputs: Sequence[Flat], op: ReduceOp
) -> None:
    """Reduce all ``inputs``, packed, everywhere; keep what belongs to ``output``."""
    total, parts = pack(team.scratch, op, inputs)
    own = parts[team.rank]
    all_reduce(team, call, total, op)
    op.finish(own, team.size)
    store(output, own)
