"""Collectives that copy, on two levels: what all members of a host need crosses the network once.

Every call begins with a step among the members of each host, also where no data is due: members
that disagree about the call learn it there, instead of waiting for each other on two levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from transport._algorithms import pairwise as pairs
from transport._call import Call
from transport._hierarchical.levels import Levels
from transport._link import wait_all
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.reduce_op import Flat

# Slots of ``Levels.scratch``.
_ARRIVING, _SENT = range(2)


def barrier(levels: Levels, call: Call) -> None:
    """Return when every member has called."""
    levels.inside.barrier(call)
    if levels.index == 0:
        levels.across(0).barrier(call)
    levels.inside.barrier(call)


def broadcast(levels: Levels, call: Call, buffer: Flat, root: int) -> None:
    """Copy ``root``'s ``buffer`` into everybody's.

    A segment of each slice at a time (up to four between sites): while they cross, the next ones go
    round on the root's host, and those before on the others. Nobody waits for an answer.
    """
    if levels.placement.find(root)[0] != levels.host:
        levels.inside.barrier(call)
    slices = levels.slices(buffer.nbytes)
    laps = levels.laps(buffer.nbytes, slices)
    for lap in range(laps):
        part = buffer[slice(*part_bounds(buffer.size, laps, lap))]
        _broadcast(levels, call, part, root, slices)


def _broadcast(levels: Levels, call: Call, buffer: Flat, root: int, slices: int) -> None:
    inside, index = levels.inside, levels.index
    root_host, root_index = levels.placement.find(root)
    at_home = levels.host == root_host
    if at_home:
        inside.broadcast(call, buffer, root_index)
    if slices == 1:
        if index == levels.speaker(root):
            levels.across_with(root).broadcast(call, buffer, root_host)
        if not at_home:
            inside.broadcast(call, buffer, 0)
        return
    parts = levels.cut(buffer, slices)
    if index < slices:
        levels.across(index).broadcast(call, parts[index], root_host)
    if not at_home:
        inside.all_gather(call, parts, parts[index])


def all_gather(levels: Levels, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
    """Gather member i's ``input_`` into ``outputs[i]`` on every member. Sizes may differ."""
    levels.inside.all_gather(call, [outputs[member] for member in levels.local], input_)
    total = sum(output.nbytes for output in outputs)
    laps = segments_of(total, levels.lap_bytes)
    slices = levels.slices(total)
    for lap in range(laps):
        parts = [output[slice(*part_bounds(output.size, laps, lap))] for output in outputs]
        _gather_from_other_hosts(levels, call, parts, slices)


def _gather_from_other_hosts(
    levels: Levels, call: Call, parts: Sequence[Flat], slices: int
) -> None:
    """Send other hosts what this one has of ``parts``, a part a member, and receive the rest.

    What arrives is packed by the slice that carries it across, then by host, then by member.
    """
    inside, index, dtype = levels.inside, levels.index, parts[0].dtype
    others = [host for host in range(len(levels.hosts)) if host != levels.host]
    arriving_members = [
        [member for host in others for member in levels.carried(host, slices, number)]
        for number in range(slices)
    ]
    members = [member for carried in arriving_members for member in carried]
    arriving = levels.scratch.flat(_ARRIVING, dtype, sum(parts[member].size for member in members))
    ends = [0, *accumulate(sum(parts[m].size for m in carried) for carried in arriving_members)]
    portions = [arriving[begin:end] for begin, end in pairwise(ends)]
    portions += [arriving[:0]] * (len(levels.local) - slices)
    if index < slices:
        sent = _pack(levels, parts, levels.carried(levels.host, slices, index))
        sizes = [sum(parts[m].size for m in levels.carried(h, slices, index)) for h in others]
        bounds = pairwise([0, *accumulate(sizes)])
        by_host = [portions[index][begin:end] for begin, end in bounds]
        by_host.insert(levels.host, sent)
        levels.across(index).all_gather(call, by_host, sent)
    inside.all_gather(call, portions, portions[index])
    end = 0
    for member in members:
        begin, end = end, end + parts[member].size
        np.copyto(parts[member], arriving[begin:end])


def _pack(levels: Levels, parts: Sequence[Flat], members: Sequence[int]) -> Flat:
    if len(members) == 1:
        return parts[members[0]]
    sizes = [parts[member].size for member in members]
    packed = levels.scratch.flat(_SENT, parts[0].dtype, sum(sizes))
    for member, (begin, end) in zip(members, pairwise([0, *accumulate(sizes)]), strict=True):
        np.copyto(packed[begin:end], parts[member])
    return packed


def gather(
    levels: Levels, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int
) -> None:
    """Gather member i's ``input_`` into ``outputs[i]`` on ``root``.

    From other hosts straight to the root: every byte crosses the network once in any case.
    """
    root_host, root_index = levels.placement.find(root)
    if levels.host != root_host:
        levels.inside.barrier(call)
        levels.whole.link(root, call).send(call, as_bytes(input_))
        return
    near = None if outputs is None else [outputs[member] for member in levels.local]
    levels.inside.gather(call, near, input_, root_index)
    if outputs is not None:
        levels.whole.reach(_members_elsewhere(levels, root), call)
        sources = [(levels.whole.link(m, call), m) for m in _members_elsewhere(levels, root)]
        wait_all([link.post_recv(call, as_bytes(outputs[m])) for link, m in sources])


def scatter(
    levels: Levels, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int
) -> None:
    """Copy ``inputs[i]`` of ``root`` into member i's ``output``; straight to other hosts."""
    root_host, root_index = levels.placement.find(root)
    if levels.host != root_host:
        levels.inside.barrier(call)
        levels.whole.link(root, call).recv_into(call, as_bytes(output))
        return
    near = None if inputs is None else [inputs[member] for member in levels.local]
    levels.inside.scatter(call, output, near, root_index)
    if inputs is not None:
        levels.whole.reach(_members_elsewhere(levels, root), call)
        targets = [(levels.whole.link(m, call), m) for m in _members_elsewhere(levels, root)]
        wait_all([link.post_send(call, as_bytes(inputs[m])) for link, m in targets])


def _members_elsewhere(levels: Levels, root: int) -> list[int]:
    """Return the members on other hosts, in the order of the ranks from ``root`` on."""
    ranks = [(root + step) % levels.size for step in range(1, levels.size)]
    return [rank for rank in ranks if rank not in levels.local]


def all_to_all(levels: Levels, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
    """Copy member i's ``inputs[j]`` into member j's ``outputs[i]``. Sizes may all differ.

    Between hosts pairwise: no two members want the same bytes, so no way saves any.
    """
    local, rank = levels.local, levels.rank
    levels.inside.all_to_all(
        call, [outputs[member] for member in local], [inputs[member] for member in local]
    )
    targets = _members_elsewhere(levels, rank)
    levels.whole.reach(targets, call)
    wait_all(pairs.swap(levels.whole, call, targets, inputs, outputs))
