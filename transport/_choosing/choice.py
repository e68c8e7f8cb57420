"""The choice of the algorithm for a collective, by bytes and number of ranks."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from transport._choosing.blocks import halving_steps

ROUND_BYTES = 16 << 20
"""The maximum bytes reduced at a time if the scratch memory is as large as the data."""


class Algorithm(enum.Enum):
    """The algorithms for collectives; the modules of ``transport._algorithms`` implement them."""

    __hash__ = object.__hash__  # Each call looks one up in a set, and Enum's hash is slow.

    DISSEMINATION = "dissemination"
    STAR = "star"
    TREE = "tree"
    CHAIN = "chain"
    DOUBLING = "doubling"
    HALVING = "halving"
    BRUCK = "bruck"
    PAIRWISE = "pairwise"
    RING = "ring"
    DIRECT = "direct"
    PARTS = "parts"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The sizes in bytes at which the choice changes; equal on every member.

    The defaults are for loopback TCP with about one core for each rank. With more ranks than cores,
    algorithms with fewer frames are faster up to larger sizes. ``meshlib tune`` measures the sizes.
    """

    star: int = 16 << 10
    """all_reduce, all_gather and reduce_scatter: a star up to this many bytes in all, in groups of
    3 to ``star_ranks``.
    """

    star_ranks: int = 8
    """The largest group that uses a star, for small data and barriers."""

    all_reduce_doubling: int = 256 << 10
    """all_reduce in groups up to ``pairwise_ranks``: recursive doubling up to this size (a tree if
    the group's size is not a power of two), pairwise above.
    """

    reduce_scatter_doubling: int = 4 << 10
    """The same for reduce_scatter, counting all inputs together."""

    all_gather_doubling: int = 16 << 10
    """all_gather, counting all outputs: Bruck up to this size, pairwise or a ring above."""

    broadcast_tree: int = 128 << 10
    """broadcast: a binomial tree up to this size; above it, a chain if ``chain_pays``."""

    reduce_tree: int = 128 << 10
    """reduce: a binomial tree up to this size; above it, with 5 or more ranks, a reduce_scatter and
    a gather.
    """

    doubling_ranks: int = 4
    """The smallest group whose all_gather and reduce_scatter use doubling. In smaller groups a ring
    takes equally few steps.
    """

    pairwise_ranks: int = 16
    """Groups up to this size exchange large data pairwise, with a connection for each pair. Larger
    groups reduce by halving and gather in a ring, with a few connections for each rank.
    """

    frame: int = 64 << 10
    """The bytes that take as long to send as the fixed cost of a frame. Groups larger than
    ``pairwise_ranks`` send more bytes in fewer frames where this costs less in total.
    """

    one_slice: int = 64 << 10
    """With several hosts: data up to this size crosses the network between one member of each host.
    Larger data is cut into as many slices as the smallest host has members.
    """

    segment: int = 512 << 10
    """The maximum bytes reduced or forwarded at a time; bounds scratch memory."""

    piece: int = 64 << 10
    """The bytes of an arriving segment that are reduced at a time, while they are in the cache."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if type(value := getattr(self, field.name)) is not int:
                raise ValueError(f"{field.name} is {value!r}, expected an integer")
        if min(self.segment, self.piece) < 1:
            what = f"segment is {self.segment}, piece {self.piece}"
            raise ValueError(f"{what}, expected at least 1")

    def barrier(self, size: int) -> Algorithm:
        """Return the algorithm for a barrier among ``size`` members."""
        return Algorithm.STAR if self._star(0, size) else Algorithm.DISSEMINATION

    def broadcast(self, nbytes: int, size: int) -> Algorithm:
        """Return the algorithm that broadcasts ``nbytes`` among ``size`` members."""
        chain = nbytes > self.broadcast_tree and self.chain_pays(nbytes, size)
        return Algorithm.CHAIN if chain else Algorithm.TREE

    def reduce(self, nbytes: int, size: int) -> Algorithm:
        """Return the algorithm that reduces ``nbytes`` to one of ``size`` members."""
        # A tree of up to two levels needs fewer frames, and its root does little more work.
        parts = nbytes > self.reduce_tree and levels_of(size) > 2
        return Algorithm.PARTS if parts else Algorithm.TREE

    def all_reduce(self, nbytes: int, size: int, narrow: bool) -> Algorithm:
        """Return the algorithm that reduces ``nbytes`` to all of ``size`` members. ``narrow`` is
        true if the reduction dtype is wider than the data's.
        """
        if self._star(nbytes, size):
            return Algorithm.STAR
        few = size <= self.pairwise_ranks and nbytes <= self.all_reduce_doubling
        if few or self._whole_pays(nbytes, size, 2, narrow):
            return _whole(size)
        return self._large(size, narrow)

    def all_gather(self, total: int, size: int) -> Algorithm:
        """Return the algorithm that gathers ``total`` bytes on all of ``size`` members."""
        if self._star(total, size):
            return Algorithm.STAR
        if size >= self.doubling_ranks and total <= self.all_gather_doubling:
            return Algorithm.BRUCK
        # Bruck sends as many bytes as a ring, and copies them once more.
        if self._may_double(total, size) and total < (size - 1 - levels_of(size)) * self.frame:
            return Algorithm.BRUCK
        return Algorithm.PAIRWISE if size <= self.pairwise_ranks else Algorithm.RING

    def reduce_scatter(self, total: int, size: int, narrow: bool) -> Algorithm:
        """Return the algorithm that reduces ``total`` bytes of input to a part for each member."""
        if self._star(total, size):
            return Algorithm.STAR
        few = self.doubling_ranks <= size <= self.pairwise_ranks
        few = few and total <= self.reduce_scatter_doubling
        if few or self._whole_pays(total, size, 1, narrow):
            return _whole(size)
        return self._large(size, narrow)

    def _star(self, nbytes: int, size: int) -> bool:
        return 2 < size <= self.star_ranks and nbytes <= self.star

    def _whole_pays(self, nbytes: int, size: int, passes: int, narrow: bool) -> bool:
        """True if a large group reduces ``nbytes`` faster as a whole than in parts. In parts, the
        data is sent ``passes`` times.
        """
        if not self._may_double(nbytes, size):
            return False
        frames = levels_of(size) * (2 if size & (size - 1) else 1)
        # In parts, narrow data is sent unwidened.
        more = frames * (2 if narrow else 1) - passes
        in_parts = passes * (size - 1 if narrow else halving_steps(size))
        return more * nbytes < (in_parts - frames) * self.frame

    def _may_double(self, nbytes: int, size: int) -> bool:
        return size > self.pairwise_ranks and nbytes <= ROUND_BYTES

    def _large(self, size: int, narrow: bool) -> Algorithm:
        pairs = narrow or size <= self.pairwise_ranks
        return Algorithm.PAIRWISE if pairs else Algorithm.HALVING

    def chain_pays(self, nbytes: int, size: int) -> bool:
        """True if a pipelined chain of ``size`` ranks beats a binomial tree for ``nbytes``.

        In a chain, the longest path sends the data and ``size - 2`` more segments. In a tree, it
        sends the data once on each level.
        """
        levels = levels_of(size)
        return nbytes + (size - 2) * self.segment <= levels * nbytes


def levels_of(size: int) -> int:
    """Return the number of doubling steps that reach ``size`` ranks."""
    return (size - 1).bit_length()


def _whole(size: int) -> Algorithm:
    """Return the algorithm that reduces a whole buffer: doubling if ``size`` is a power of two."""
    return Algorithm.TREE if size & (size - 1) else Algorithm.DOUBLING


DEFAULT = Thresholds()
