"""What an algorithm sees of the communicator that runs it."""

from __future__ import annotations

from typing import Protocol

from transport.algorithms.choice import Thresholds
from transport.call import Call
from transport.flat import Scratch
from transport.link import Link


class Team(Protocol):
    """The members of a group, seen from one of them: ``rank`` of ``size``, and links to all."""

    rank: int
    size: int
    table: Thresholds
    scratch: Scratch

    def link(self, peer: int, call: Call) -> Link:
        """Return the link to the member ``peer``, opening it at the first use."""
        ...

    def ahead(self, call: Call) -> int:
        """Return how many bytes should be under way on a link. All members call, or none."""
        ...
