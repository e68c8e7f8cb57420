"""An algorithm's view of the communicator that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._link import Link
from transport._operands.flat import Scratch


class Team(ABC):
    """The members of a group, seen from one of them: ``rank`` of ``size``, and links to all."""

    rank: int
    size: int
    table: Thresholds
    scratch: Scratch

    @abstractmethod
    def link(self, peer: int, call: Call) -> Link:
        """Return the link to the member ``peer`` (never this rank), opening it at the first use.

        Called for every frame: an open link must be found fast. Waits at most until
        ``call.deadline``. Only the thread that makes collectives calls it.
        """

    def reach(self, peers: Sequence[int], call: Call) -> None:  # noqa: B027 (where it costs nothing)
        """Begin to open the links to ``peers``, as far as it is for this rank to do, all at once.

        For the sake of time alone: ``link`` opens what is not open.
        """
