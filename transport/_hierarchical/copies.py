"""Copying collectives on two levels: data for all members of a host crosses the network once.

Every call begins with a step among the members of each host, even without data to exchange. This
step detects mismatched calls; without it, members could wait for each other on different levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from transport._algorithms import pairwise as pairs
from transport._calls.call import Call
from transport._hierarchical.levels import Levels
from transport._link import Link, wait_all
from transport._operands.flat import as_bytes, part_bounds, segments_of
from transport._operands.reduce_op import Flat

# Slots of ``Levels.scratch``.
_ARRIVING, _SENT = range(2)


class Copies(Levels):
    """The collectives that only copy."""

    def barrier(self, call: Call) -> None:
        self.inside.barrier(call)
        if self.index == 0:
            self.across(0).barrier(call)
        self.inside.barrier(call)

    def broadcast(self, call: Call, buffer: Flat, root: int) -> None:
        # Broadcasts a segment of each slice at a time, in a pipeline: while segments cross, the
        # root's host broadcasts the next segments, and the other hosts the previous ones.
        if self.placement.find(root)[0] != self.host:
            self.inside.barrier(call)
        slices = self.slices(buffer.nbytes)
        chunks = segments_of(buffer.nbytes, slices * self.table.segment)
        for chunk in range(chunks):
            part = buffer[slice(*part_bounds(buffer.size, chunks, chunk))]
            self._broadcast(call, part, root, slices)

    def _broadcast(self, call: Call, buffer: Flat, root: int, slices: int) -> None:
        inside, index = self.inside, self.index
        root_host, root_index = self.placement.find(root)
        at_home = self.host == root_host
        if at_home:
            inside.broadcast(call, buffer, root_index)
        parts = self.cut(buffer, slices)
        if index < slices:
            self.across(index).broadcast(call, parts[index], root_host)
        if not at_home:
            inside.all_gather(call, parts, parts[index])

    def all_gather(self, call: Call, outputs: Sequence[Flat], input_: Flat) -> None:
        self.inside.all_gather(call, [outputs[member] for member in self.local], input_)
        total = sum(output.nbytes for output in outputs)
        slices, chunks = self.slices(total), segments_of(total, self.chunk_bytes)
        for chunk in range(chunks):
            parts = [out[slice(*part_bounds(out.size, chunks, chunk))] for out in outputs]
            self._gather_from_other_hosts(call, parts, slices)

    def _gather_from_other_hosts(self, call: Call, parts: Sequence[Flat], slices: int) -> None:
        """Send this host's ``parts``, one for each member, to the other hosts; receive theirs.

        Arriving parts are packed by the slice that carries them, then by host, then by member.
        """
        inside, index, dtype = self.inside, self.index, parts[0].dtype
        others = [host for host in range(len(self.hosts)) if host != self.host]
        arriving_members = [
            [member for host in others for member in self.carried(host, slices, number)]
            for number in range(slices)
        ]
        members = [member for carried in arriving_members for member in carried]
        arriving = self.scratch.flat(
            _ARRIVING, dtype, sum(parts[member].size for member in members)
        )
        ends = [0, *accumulate(sum(parts[m].size for m in carried) for carried in arriving_members)]
        portions = [arriving[begin:end] for begin, end in pairwise(ends)]
        portions += [arriving[:0]] * (len(self.local) - slices)
        if index < slices:
            sent = self._pack(parts, self.carried(self.host, slices, index))
            sizes = [sum(parts[m].size for m in self.carried(h, slices, index)) for h in others]
            bounds = pairwise([0, *accumulate(sizes)])
            by_host = [portions[index][begin:end] for begin, end in bounds]
            by_host.insert(self.host, sent)
            self.across(index).all_gather(call, by_host, sent)
        inside.all_gather(call, portions, portions[index])
        end = 0
        for member in members:
            begin, end = end, end + parts[member].size
            np.copyto(parts[member], arriving[begin:end])

    def _pack(self, parts: Sequence[Flat], members: Sequence[int]) -> Flat:
        if len(members) == 1:
            return parts[members[0]]
        sizes = [parts[member].size for member in members]
        packed = self.scratch.flat(_SENT, parts[0].dtype, sum(sizes))
        for member, (begin, end) in zip(members, pairwise([0, *accumulate(sizes)]), strict=True):
            np.copyto(packed[begin:end], parts[member])
        return packed

    def gather(self, call: Call, outputs: Sequence[Flat] | None, input_: Flat, root: int) -> None:
        # Other hosts send straight to the root, because every byte crosses the network only once.
        root_host, root_index = self.placement.find(root)
        if self.host != root_host:
            self.inside.barrier(call)
            self.whole.link(root, call).send(call, as_bytes(input_))
            return
        near = None if outputs is None else [outputs[member] for member in self.local]
        self.inside.gather(call, near, input_, root_index)
        if outputs is not None:
            sources = self._links_elsewhere(root, call)
            wait_all([link.post_recv(call, as_bytes(outputs[m])) for link, m in sources])

    def scatter(self, call: Call, output: Flat, inputs: Sequence[Flat] | None, root: int) -> None:
        root_host, root_index = self.placement.find(root)
        if self.host != root_host:
            self.inside.barrier(call)
            self.whole.link(root, call).recv_into(call, as_bytes(output))
            return
        near = None if inputs is None else [inputs[member] for member in self.local]
        self.inside.scatter(call, output, near, root_index)
        if inputs is not None:
            targets = self._links_elsewhere(root, call)
            wait_all([link.post_send(call, as_bytes(inputs[m])) for link, m in targets])

    def _links_elsewhere(self, root: int, call: Call) -> list[tuple[Link, int]]:
        """Return the links to the members on other hosts, in rank order starting at ``root``."""
        ranks = [(root + step) % self.size for step in range(1, self.size)]
        members = [rank for rank in ranks if rank not in self.local]
        self.whole.reach(members, call)
        return [(self.whole.link(member, call), member) for member in members]

    def all_to_all(self, call: Call, outputs: Sequence[Flat], inputs: Sequence[Flat]) -> None:
        # Pairwise between hosts: every member gets different bytes, so two levels would save none.
        near = [[parts[member] for member in self.local] for parts in (outputs, inputs)]
        self.inside.all_to_all(call, *near)
        targets = [member for _, member in self._links_elsewhere(self.rank, call)]
        wait_all(pairs.swap(self.whole, call, targets, inputs, outputs))
