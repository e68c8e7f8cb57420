"""The one table for the choice of algorithms, by bytes and by ranks."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from transport._choosing.blocks import halving_steps

ROUND_BYTES = 16 << 20
"""The most that is reduced at a time where that takes scratch memory for all of it."""


class Algorithm(enum.Enum):
    """The ways of carrying out a collective, one module of this package each."""

    __hash__ = object.__hash__  # Each call looks for one in a set; Enum's own is in Python.

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
    """The sizes at which one algorithm gives way to another, in bytes, equal on every member.

    The defaults are for loopback TCP with about one core for each rank. With more ranks than cores,
    algorithms with fewer frames pay off up to larger sizes. ``meshlib tune`` measures these sizes.
    """

    star: int = 16 << 10
    """all_reduce, and all parts together of all_gather and reduce_scatter: via one member up to
    here, in groups from 3 to ``star_ranks``.
    """

    star_ranks: int = 8
    """The most ranks for which small data and barriers go via one member."""

    all_reduce_doubling: int = 256 << 10
    """all_reduce in groups up to ``pairwise_ranks``: recursive doubling, or a tree where their size
    is not a power of two, up to here, then pairwise.
    """

    reduce_scatter_doubling: int = 4 << 10
    """reduce_scatter, all inputs together: likewise."""

    all_gather_doubling: int = 16 << 10
    """all_gather, all outputs together: Bruck up to here, then pairwise or a ring."""

    broadcast_tree: int = 128 << 10
    """broadcast: a binomial tree up to here, then a chain where it ``chain_pays``."""

    reduce_tree: int = 128 << 10
    """reduce: a binomial tree up to here, then a reduce_scatter and a gather, from 5 ranks on."""

    doubling_ranks: int = 4
    """Groups smaller than this take as few steps in a ring, so all_gather and reduce_scatter
    double from this size on.
    """

    pairwise_ranks: int = 16
    """Groups up to this size move large data pairwise, over a connection for each pair; larger
    ones reduce by halving and gather in a ring, over a few connections a rank.
    """

    frame: int = 64 << 10
    """A frame takes as long as so many bytes sent. In groups larger than ``pairwise_ranks`` more
    bytes in fewer frames pay up to larger sizes: where that is less in all.
    """

    one_slice: int = 64 << 10
    """Over several hosts: data up to here crosses the network between one member of each host;
    more of it is cut into slices, as many as the smallest host has members.
    """

    segment: int = 512 << 10
    """The most that is reduced or passed on at a time; bounds scratch memory."""

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
        """Return how ``size`` members wait for each other."""
        return Algorithm.STAR if self._star(0, size) else Algorithm.DISSEMINATION

    def broadcast(self, nbytes: int, size: int) -> Algorithm:
        """Return how ``nbytes`` are broadcast among ``size`` members."""
        chain = nbytes > self.broadcast_tree and self.chain_pays(nbytes, size)
        return Algorithm.CHAIN if chain else Algorithm.TREE

    def reduce(self, nbytes: int, size: int) -> Algorithm:
        """Return how ``nbytes`` are reduced to one of ``size`` members."""
        # Up to two levels a tree's root takes little more, in fewer frames.
        parts = nbytes > self.reduce_tree and levels_of(size) > 2
        return Algorithm.PARTS if parts else Algorithm.TREE

    def all_reduce(self, nbytes: int, size: int, narrow: bool) -> Algorithm:
        """Return how ``nbytes`` are reduced to all of ``size`` members. ``narrow``: their dtype is
        reduced in a wider one.
        """
        if self._star(nbytes, size):
            return Algorithm.STAR
        few = size <= self.pairwise_ranks and nbytes <= self.all_reduce_doubling
        if few or self._whole_pays(nbytes, size, 2, narrow):
            return _whole(size)
        return self._large(size, narrow)

    def all_gather(self, total: int, size: int) -> Algorithm:
        """Return how ``total`` bytes are gathered to all of ``size`` members."""
        if self._star(total, size):
            return Algorithm.STAR
        if size >= self.doubling_ranks and total <= self.all_gather_doubling:
            return Algorithm.BRUCK
        # Bruck sends what a ring does, and copies it once more.
        if self._may_double(total, size) and total < (size - 1 - levels_of(size)) * self.frame:
            return Algorithm.BRUCK
        return Algorithm.PAIRWISE if size <= self.pairwise_ranks else Algorithm.RING

    def reduce_scatter(self, total: int, size: int, narrow: bool) -> Algorithm:
        """Return how ``total`` bytes of input are reduced to parts for ``size`` members."""
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
        """True if a large group reduces ``nbytes`` sooner all at once than in parts, where they
        pass ``passes`` times.
        """
        if not self._may_double(nbytes, size):
            return False
        frames = levels_of(size) * (2 if size & (size - 1) else 1)
        # In parts, what is narrow travels as it is.
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

        In a chain, one link passes all the data and ``size - 2`` more segments before the last
        rank has everything. In a tree, all the data passes once on each level.
        """
        levels = levels_of(size)
        return nbytes + (size - 2) * self.segment <= levels * nbytes


def levels_of(size: int) -> int:
    """Return in how many steps ``size`` ranks are reached by doubling."""
    return (size - 1).bit_length()


def _whole(size: int) -> Algorithm:
    """Return how everything is reduced at once: doubling has the fewest steps, where it is one."""
    return Algorithm.TREE if size & (size - 1) else Algorithm.DOUBLING


DEFAULT = Thresholds()
