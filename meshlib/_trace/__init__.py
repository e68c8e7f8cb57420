"""Flight records after the fact: dumps of all ranks, merged, explained and drawn."""

from typing import Protocol

RECORDS = "rank*.json"
"""The file names of the ranks' records. Defined here for the launcher, which lacks NumPy."""

HOW_TO_KEEP = (
    "meshrun --log-dir DIR keeps what each rank was doing when a job fails, and meshlib trace DIR"
    " explains it"
)
"""The advice given when files are missing."""


class GroupInfo(Protocol):
    """The part of a ProcessGroup that a dump names."""

    id: str
    ranks: tuple[int, ...]

    @property
    def group_desc(self) -> str:
        """The group's purpose."""
        ...
