"""Flight records after the fact: dumps of all ranks, merged, explained and drawn."""

from typing import Protocol

RECORDS = "rank*.json"
"""How the ranks' files are called. It is here for the launcher, which does without NumPy."""

HOW_TO_KEEP = (
    "meshrun --log-dir DIR keeps what each rank was doing when a job fails, and meshlib trace DIR"
    " explains it"
)
"""What to say where files are missing."""


class GroupInfo(Protocol):
    """The part of a ProcessGroup that a dump names."""

    id: str
    ranks: tuple[int, ...]

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        ...
