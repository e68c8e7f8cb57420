"""Analysis of flight records: dumps of all ranks, merged, explained and drawn."""

from typing import Protocol

RECORDS = "rank*.json"
"""The file names of the ranks' records. Defined here so that the launcher need not import NumPy."""

HOW_TO_KEEP = (
    "meshrun --log-dir DIR saves each rank's last calls when a job fails, and meshlib trace DIR"
    " explains them"
)
"""The advice given when files are missing."""


class GroupInfo(Protocol):
    """The properties of a ProcessGroup that a dump needs."""

    id: str
    ranks: tuple[int, ...]

    @property
    def group_desc(self) -> str:
        """The group's purpose."""
        ...
