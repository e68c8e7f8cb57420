"""What may be tuned of shared memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes, equal on all members; 0: chosen by the number of members.

    ``block`` is the most that a member stages at a time; ``direct`` the most that every member
    reduces for itself from all others' blocks, instead of its share (two members do eight times as
    much); ``ring`` what lies between a sender and a receiver of messages; ``piece`` how much of a
    broadcast is staged at a time; ``unstaged`` how much is read at a time where nothing is staged.
    """

    block: int = 0
    direct: int = 16 << 10
    ring: int = 0
    piece: int = 256 << 10
    unstaged: int = 64 << 20


DEFAULT_SIZES = Sizes()
