"""How the calls of one communicator follow each other, for those of which two can overlap."""

from __future__ import annotations

from typing import Protocol


class Turns(Protocol):
    """Whose turn it is. Two calls are under way at most, and one of them runs at a time."""

    def note_overlapping(self) -> None:
        """Be told that calls may overlap from now on. Again and again, maybe."""
        ...

    def begin_next(self, most: int) -> bool:
        """Have the next call begin if one is due that may, of ``most`` bytes; return whether.

        For a call that has nothing more to send. Returns when the next one waits in its turn for
        the end of this one, or is over.
        """
        ...

    def await_former(self) -> None:
        """Wait for the end of the call before this one, if it is still under way."""
        ...
