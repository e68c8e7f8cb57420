"""Gather and scatter straight between the root and each member: every byte travels once."""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.team import Team
from transport.call import Call
from transport.operands.flat import as_bytes
from transport.operands.operand import store
from transport.operands.reduce_op import Flat


def gather(team: Team, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
    """Copy member i's ``input_`` into ``outputs[i]`` of ``root``. Sizes may differ."""
    if outputs is None:
        team.link(root, call).send(call, as_bytes(input_))
        return
    for step in range(1, team.size):
        source = (root + step) % team.size
        team.link(source, call).recv_into(call, as_bytes(outputs[source]))
    store(outputs[root], input_)


def scatter(team: Team, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
    """Copy ``inputs[i]`` of ``root`` into member i's ``output``. Sizes may differ."""
    if inputs is None:
        team.link(root, call).recv_into(call, as_bytes(output))
        return
    for step in range(1, team.size):
        target = (root + step) % team.size
        team.link(target, call).send(call, as_bytes(inputs[target]))
    store(output, inputs[root])
