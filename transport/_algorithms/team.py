"""The interface of a communicator that the algorithms use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from transport._calls.call import Call
from transport._choosing.choice import Thresholds
from transport._link import Link
from transport._operands.flat import Scratch


class Team(ABC):
    """A group of ``size`` members as seen by member ``rank``, with links to all other members."""

    rank: int
    size: int
    table: Thresholds
    scratch: Scratch

    @abstractmethod
    def link(self, peer: int, call: Call) -> Link:
        """Return the link to the member ``peer`` (never this rank), opening it at the first use.

        Called for every frame, so finding an open link must be fast. Waits until ``call.deadline``
        at most. Only the thread that makes collectives calls it.
        """

    def reach(self, peers: Sequence[int], call: Call) -> None:  # noqa: B027 (where it costs nothing)
        """Start to open the links to ``peers``, all at once, where this rank is the one to connect.

        Only an optimisation: ``link`` opens any link that is not open yet.
        """
