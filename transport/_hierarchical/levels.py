"""One member's peers on each level of a group over several hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transport._algorithms.alone import Alone
from transport._algorithms.collectives import LinkCollectives
from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._communicators.base import BufferCollectives
from transport._hierarchical.hosts import MembersByHost
from transport._link import Link
from transport._links.communicator import LinkCommunicator
from transport._operands.flat import Scratch, part_bounds, segments_of
from transport._operands.order import Subtree, are_one_tree, subtrees
from transport._operands.reduce_op import Flat

_CHUNK_SEGMENTS = 16
# Larger, because each chunk of an all_gather or a reduce_scatter waits for one network latency.
_CHUNK_SEGMENTS_BETWEEN_SITES = 128

Tables = Callable[[str, int], Thresholds]
"""Returns the thresholds of a transport, by its name in the tuning, for a number of ranks."""


class Selection(LinkCollectives):
    """Collectives among selected ``members``: ranks of ``whole``, including this one.

    Ranks of the selection are places in ``members``, but errors name the ranks of the whole group.
    ``whole`` may itself be a selection. Creating a selection sends nothing; it reuses open links.
    """

    def __init__(
        self, whole: LinkCommunicator | Selection, members: Sequence[int], table: Thresholds
    ) -> None:
        self.rank = members.index(whole.rank)
        self.size = len(members)
        self.table = table
        self.scratch = whole.scratch
        self.tuned_as = whole.tuned_as
        self._whole = whole
        self._members = members

    def link(self, peer: int, call: Call) -> Link:
        return self._whole.link(self._members[peer], call)

    def reach(self, peers: Sequence[int], call: Call) -> None:
        self._whole.reach([self._members[peer] for peer in peers], call)

    def check_open(self) -> None:
        self._whole.check_open()


class Levels(BufferCollectives):
    """A member's peers: ``inside`` its host, and ``across`` hosts.

    ``whole`` connects all members. ``near``, if given, connects the members on this host by shared
    memory. If a host here is really a site, its members are in turn connected on two levels. Data
    is cut into slices. Slice s crosses the network between the members with index s on their hosts;
    this rank has index ``index`` among the members ``local`` of ``host``.
    """

    def __init__(
        self,
        placement: MembersByHost,
        whole: LinkCommunicator | Selection,
        tables: Tables,
        near: BufferCollectives | None = None,
        *,
        between_sites: bool = False,
    ) -> None:
        self.rank = whole.rank
        self.size = whole.size
        self.placement = placement
        self.hosts = placement.hosts
        self.host, self.index = placement.find(whole.rank)
        self.local = self.hosts[self.host]
        self.whole = whole
        self.table = tables("hierarchical", whole.size)
        self.scratch = Scratch()
        self.blocks_by_host: tuple[tuple[Subtree, ...], ...] = tuple(
            subtrees(ranks, self.size) for ranks in self.hosts
        )
        self.blocks = self.blocks_by_host[self.host]
        """The subtrees of the order of addition that consist of this host's members."""
        self.all_blocks = sorted(block for blocks in self.blocks_by_host for block in blocks)
        self.one_tree: bool = are_one_tree(self.hosts)
        """True if the hosts' sums are added in the order of a group with one rank on each host."""
        segments = _CHUNK_SEGMENTS_BETWEEN_SITES if between_sites else _CHUNK_SEGMENTS
        self.chunk_bytes: int = segments * self.table.segment
        """The bytes processed at a time by operations that need scratch memory."""
        self._most_slices = min(len(ranks) for ranks in self.hosts)
        self._tables = tables
        self._selections: dict[tuple[int, ...], Selection] = {}
        alone = len(self.local) == 1
        self.inside: BufferCollectives = near or (
            Alone(self.table.segment) if alone else self.select(self.local)
        )

    def chunks(self, count: int, itemsize: int) -> list[tuple[int, int]]:
        """Return the start and stop of each chunk of ``count`` elements."""
        chunks = segments_of(count * itemsize, self.chunk_bytes)
        return [part_bounds(count, chunks, chunk) for chunk in range(chunks)]

    def slices(self, nbytes: int) -> int:
        """Return the number of slices for ``nbytes``: one up to ``one_slice`` bytes."""
        return 1 if nbytes <= self.table.one_slice else self._most_slices

    def across(self, number: int) -> Selection:
        """Return the selection that exchanges slice ``number`` over the network.

        It has one member of each host, in the order of the hosts, and must include this rank.
        """
        across = self.select(tuple(ranks[number] for ranks in self.hosts))
        across.compression = self.whole.compression
        return across

    def cut(self, buffer: Flat, slices: int) -> list[Flat]:
        """Return the slice of ``buffer`` for each member of this host; surplus ones are empty."""
        parts = [buffer[slice(*part_bounds(buffer.size, slices, s))] for s in range(slices)]
        return parts + [buffer[:0]] * (len(self.local) - slices)

    def carried(self, host: int, slices: int, number: int) -> tuple[int, ...]:
        """Return the members of ``host`` whose blocks slice ``number`` carries."""
        ranks = self.hosts[host]
        return ranks[slice(*part_bounds(len(ranks), slices, number))]

    def select(self, members: tuple[int, ...]) -> Selection:
        """Return the selection of ``members``, which must include this rank, over ``whole``."""
        selection = self._selections.get(members)
        if selection is None:
            table = self._tables(self.whole.tuned_as, len(members))
            selection = self._selections[members] = Selection(self.whole, members, table)
        return selection
