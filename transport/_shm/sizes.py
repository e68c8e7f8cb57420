"""The tunable sizes of shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes, equal on all members; 0: depends on the number of members.

    ``block``: the most that a member stages at a time. ``direct``: up to this size, each member
    reduces whole arrays itself, instead of its share; two members do so up to eight times this
    size. ``ring``: the capacity of a ring between a sender and a receiver. ``unstaged``: the bytes
    read at a time from symmetric memory.
    """

    block: int = 0
    direct: int = 16 << 10
    ring: int = 0
    unstaged: int = 64 << 20


DEFAULT_SIZES = Sizes()
