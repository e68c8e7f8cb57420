"""The sizes by which shared memory is tuned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes, equal on all members; 0: chosen by the number of members.

    A member stages ``block`` at a time at most. Up to ``direct`` every member reduces all others'
    blocks for itself, instead of its share. Two members do that up to eight times as much. A ring
    between a sender and a receiver has ``ring``. Where nothing is staged, ``unstaged`` is read at
    a time.
    """

    block: int = 0
    direct: int = 16 << 10
    ring: int = 0
    unstaged: int = 64 << 20


DEFAULT_SIZES = Sizes()
