"""Gather and scatter straight between the root and each member: every byte travels once."""

from __future__ import annotations

from collections.abc import Sequence

from transport._algorithms.team import Team
from transport._call import Call
from transport._link import wait_all
from transport._operands.flat import as_bytes
from transport._operands.operand import store
from transport._operands.reduce_op import Flat


def gather(team: Team, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
    """Copy member i's ``input_`` into ``outputs[i]`` of ``root``. Sizes may differ."""
    if outputs is None:
        team.link(root, call).send(call, as_bytes(input_))
        return
    sources = [(root + step) % team.size for step in range(1, team.size)]
    wait_all([team.link(each, call).post_recv(call, as_bytes(outputs[each])) for each in sources])
    store(outputs[root], input_)


def scatter(team: Team, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
    """Copy ``inputs[i]`` of ``root`` into member i's ``output``. Sizes may differ."""
    if inputs is None:
        team.link(root, call).recv_into(call, as_bytes(output))
        return
    targets = [(root + step) % team.size for step in range(1, team.size)]
    wait_all([team.link(each, call).post_send(call, as_bytes(inputs[each])) for each in targets])
    store(output, inputs[root])
