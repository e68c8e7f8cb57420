"""Where everything lies in the segment that the members of a group share.

::

    head        magic, version, members, bytes of a block
    sleepers    one byte a member, set while it sleeps in the kernel
    counters    one line a member: how far it is
    cards       for each member CARDS cards: which call it is in, and what it says about it
    blocks      for each member BLOCKS blocks of data

Counters, cards and flags have one writer: the member that they belong to. So have blocks, but for
large all_reduces, which write results back to where the inputs were staged.
"""

from __future__ import annotations

from dataclasses import dataclass

from transport.call import HEADER_BYTES
from transport.errors import DistBackendError
from transport.shm.board.segment import LINE, PAGE

BLOCKS = 4
CARDS = 4
WORD = 8
_MAGIC = 0x6D6573686C696201
_MOST_STAGED = 16 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """What may be tuned, in bytes; the member of group rank 0 decides for all.

    ``block`` is the most that a member stages at a time (0: chosen by the number of members);
    ``direct`` the most that every member reduces for itself from all others' blocks, instead of
    its share; ``ring`` what lies between a sender and a receiver of messages; ``piece`` how much is
    worked on at a time so that it stays in a core's cache; ``single`` from how much on others read
    a private array themselves, where the kernel lets them.
    """

    block: int = 0
    direct: int = 16 << 10
    ring: int = 0
    piece: int = 256 << 10
    single: int = 4 << 20


DEFAULT_SIZES = Sizes()


def lines(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole cache lines."""
    return -(-nbytes // LINE) * LINE


def pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in bytes for ``size`` members with blocks of ``block`` bytes."""

    size: int
    block: int

    @classmethod
    def choose(cls, size: int, sizes: Sizes) -> Layout:
        """Return the layout for ``size`` members: bounded memory, and a share for each peer."""
        block = sizes.block or min(512 << 10, _MOST_STAGED // (size * BLOCKS))
        return cls(size, lines(max(block, LINE * size)))

    @property
    def sleepers(self) -> int:
        """Where the members' sleeping flags begin."""
        return LINE

    def counter(self, rank: int) -> int:
        """Where ``rank``'s counter is."""
        return LINE + lines(self.size) + rank * LINE

    @property
    def card_bytes(self) -> int:
        """The bytes of a card: the call, two notes, and three more for each member."""
        return lines(HEADER_BYTES + WORD * (2 + 3 * self.size))

    def card(self, rank: int, slot: int) -> int:
        """Where card ``slot`` of ``rank`` begins."""
        start = LINE + lines(self.size) + self.size * LINE
        return start + (rank * CARDS + slot) * self.card_bytes

    def data(self, rank: int, slot: int) -> int:
        """Where block ``slot`` of ``rank`` begins."""
        return pages(self.card(self.size, 0)) + (rank * BLOCKS + slot) * self.block

    @property
    def nbytes(self) -> int:
        """The bytes of the whole segment."""
        return pages(self.data(self.size, 0))

    def head(self) -> tuple[int, int, int]:
        """Return the first words of the segment."""
        return _MAGIC, self.size, self.block

    @classmethod
    def read(cls, words: memoryview, nbytes: int) -> Layout:
        """Return the layout that a segment says it has; DistBackendError for a foreign one."""
        magic, size, block = words[0], words[1], words[2]
        layout = cls(size, block)
        if magic != _MAGIC or block % LINE or layout.nbytes != nbytes:
            raise DistBackendError(
                f"the group's shared memory ({nbytes} bytes) has another layout than this version"
                " of the package makes; expected the same version on all ranks"
            )
        return layout
