"""What an agent knows and hears of the job beyond its own ranks.

An agent is an event loop. It asks its coordinator for a place (``join``), tells it how its ranks
end, and obeys what ``poll`` returns. With one node the answers are immediate; with several they
come from the node that leads (see ``many_nodes``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from meshlib.launcher.ranks.failure import RankExit


@dataclass(frozen=True, slots=True)
class Placement:
    """This node's place in one attempt to run the job, and the store that its ranks use."""

    attempt: int
    node: int
    nodes: int
    first_rank: int
    ranks: int
    world_size: int
    store_host: str
    store_port: int
    secret: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Start the ranks."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Stop:
    """End the ranks: something happened elsewhere."""

    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The attempt is over on all nodes: go on with another, or end with what is here.

    ``exits`` are the failures on all nodes and the ranks that were stopped, ``error`` a failure
    that was no rank's and led to those of ranks.
    """

    again: bool
    exits: Sequence[RankExit] = ()
    error: str | None = None


Event = Placed | Stop | Verdict


class Coordinator(ABC):
    """One job, seen from one node. All methods return soon and are for one thread."""

    @abstractmethod
    def join(self) -> None:
        """Ask for a place in the next attempt: ``Placed`` will follow."""

    @abstractmethod
    def poll(self) -> list[Event]:
        """Return what is new, in order."""

    @abstractmethod
    def failed(self, exit_: RankExit) -> None:
        """Tell the job's ranks, and the other nodes, that a rank here has failed."""

    @abstractmethod
    def finished(self, ranks: Sequence[int]) -> None:
        """Tell the job's ranks that the programs of ``ranks``, here, have ended well."""

    @abstractmethod
    def interrupted(self) -> None:
        """Tell that the user wants the job to end, before the ranks here are told.

        Returns when it is said, or after a moment: the ranks of other nodes fail when those here
        end, and what comes first is taken for the cause.
        """

    @abstractmethod
    def ended(self, exits: Sequence[RankExit], interrupted: bool) -> None:
        """Tell that all ranks here have ended: a ``Verdict`` will follow.

        ``exits`` are those that failed or were stopped. ``interrupted``: by the user's wish, so
        nothing is tried again.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the job; close connections and what this node serves."""
