"""What an agent knows and hears of the job beyond its own ranks, and the answer on one node.

An agent is an event loop. It asks its coordinator for a place (``join``), tells it how its ranks
end, and obeys what ``poll`` returns. With one node the answers are immediate (``OneNode``); with
several they come from the node that leads (see ``many_nodes``).

A job that goes on when ranks are lost has ended as its first member has: rank 0, until the members
agree on an epoch without it (``shrink_group``, ``ElasticMesh``), and then the first of those who
have gone on.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshlib.diagnosis.event_log import LogReader, announce_ends, announce_lost, last_log
from meshlib.diagnosis.events import Agreed, parse
from meshlib.job.membership import epoch_number
from meshlib.launcher.ranks.failure import RankExit
from transport import environment
from transport.errors import DistError
from transport.store.base import Store
from transport.store.tcp.server import TCPStoreServer
from transport.store.tcp.store import TCPStore

_OF_A_LAUNCH = (environment.MESH, environment.LAUNCHER, environment.ERROR_FILE)


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

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the ranks here: ``inherited``, with what leads them to the job.

        What a launch around this one has said of its own ranks is gone.
        """
        address = f"{self.store_host}:{self.store_port}"
        variables = {name: text for name, text in inherited.items() if name not in _OF_A_LAUNCH}
        for name in (environment.TLS_CERT, environment.TLS_KEY, environment.TLS_CA):
            if variables.get(name):
                variables[name] = os.path.abspath(variables[name])  # ranks may change directory
        if self.secret:
            variables[environment.SECRET] = self.secret
        return variables | {
            environment.WORLD_SIZE: str(self.world_size),
            environment.LOCAL_WORLD_SIZE: str(self.ranks),
            environment.GROUP_RANK: str(self.node),
            environment.GROUP_WORLD_SIZE: str(self.nodes),
            environment.MASTER_ADDR: self.store_host,
            environment.MASTER_PORT: str(self.store_port),
            environment.AGENT_STORE: address,
            environment.RESTART_COUNT: str(self.attempt),
        }

    def variables_of(self, local_rank: int) -> dict[str, str]:
        """Return what is a rank's own in its environment."""
        return {
            environment.RANK: str(self.first_rank + local_rank),
            environment.LOCAL_RANK: str(local_rank),
        }


@dataclass(frozen=True, slots=True)
class Placed:
    """Start the ranks."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Come:
    """Start the ``ranks`` that were asked for (``want``): they come to those that run."""

    ranks: range


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


Decision = Placed | Come | Stop | Verdict


class Coordinator(ABC):
    """One job, seen from one node. All methods return soon and are for one thread."""

    @abstractmethod
    def join(self) -> None:
        """Ask for a place in the next attempt: ``Placed`` will follow."""

    @abstractmethod
    def poll(self) -> list[Decision]:
        """Return what is new, in order."""

    @property
    @abstractmethod
    def alone(self) -> bool:
        """Whether there are no ranks but this node's."""

    @abstractmethod
    def want(self, count: int) -> None:
        """Ask for the numbers of so many more ranks, which come later: ``Come`` will follow."""

    @abstractmethod
    def failed(self, exit_: RankExit) -> None:
        """Tell the job's ranks, and the other nodes, that a rank here has failed."""

    @abstractmethod
    def finished(self, ranks: Sequence[int]) -> None:
        """Tell the job's ranks that the programs of ``ranks``, here, have ended well."""

    @abstractmethod
    def interrupted(self, *, leaves: bool = False) -> None:
        """Tell that the user wants the job to end, before the ranks here are told; ``leaves``: this
        node alone is to end, where the others can go on without it.

        Returns when it is said, or after a moment: the ranks of other nodes fail when those here
        end, and what comes first is taken for the cause.
        """

    @abstractmethod
    def ended(self, exits: Sequence[RankExit], interrupted: bool, well: int = 0) -> None:
        """Tell that all ranks here have ended: a ``Verdict`` will follow.

        ``exits`` are those that failed or were stopped, ``well`` how many others there are.
        ``interrupted``: by the user's wish, so nothing is tried again.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the job; close connections and what this node serves."""


HOST = "127.0.0.1"
_TELL_SECONDS = 2.0


class OneNode(Coordinator):
    """A job of ``ranks`` ranks, tried again up to ``max_restarts`` times.

    ``port`` 0 takes any free one, so that jobs on one machine never meet. ``continues``: the job
    goes on when a rank is lost, and has ended as its first member has.
    """

    def __init__(
        self, ranks: int, max_restarts: int, port: int = 0, *, continues: bool = False
    ) -> None:
        self._ranks = ranks
        self._next = ranks
        self._restarts_left = max_restarts
        self._continues = continues
        self._attempt = -1
        self._running = 0
        self._events: list[Decision] = []
        secret = os.urandom(32)
        self._secret = secret.hex()
        self._server = TCPStoreServer(HOST, port, secret=secret)

    def join(self) -> None:
        """Place all ranks here."""
        self._events.append(Placed(self.place()))

    def place(self) -> Placement:
        """Begin an attempt, and return the place of all ranks in it, which is here."""
        self._attempt += 1
        self._running = self._next = self._ranks
        return Placement(
            attempt=self._attempt,
            node=0,
            nodes=1,
            first_rank=0,
            ranks=self._ranks,
            world_size=self._ranks,
            store_host=HOST,
            store_port=self._server.port,
            secret=self._secret,
        )

    def poll(self) -> list[Decision]:
        """Return what is new, in order."""
        events, self._events = self._events, []
        return events

    @property
    def alone(self) -> bool:
        """There is no other node."""
        return True

    def want(self, count: int) -> None:
        """Number so many more ranks, after all that there are."""
        ranks = range(self._next, self._next + count)
        self._next, self._running = ranks.stop, self._running + count
        self._events.append(Come(ranks))

    def failed(self, exit_: RankExit) -> None:
        """Tell the other ranks, who may be waiting for this one."""
        self._tell(lambda store: announce_lost(store, [exit_.loss]))

    def finished(self, ranks: Sequence[int]) -> None:
        """Tell the other ranks, who may be waiting for these to come."""
        self._running -= len(ranks)
        if self._running:
            self._tell(lambda store: announce_ends(store, self._attempt, ranks))

    def interrupted(self, *, leaves: bool = False) -> None:
        """There is nobody to tell."""

    def ended(self, exits: Sequence[RankExit], interrupted: bool, well: int = 0) -> None:
        """Decide whether to try again."""
        if self._continues and not interrupted:
            exits = self._exits_that_count(exits)
        failed = any(not item.ok for item in exits)
        again = failed and not interrupted and self._restarts_left > 0
        if again:
            self._restarts_left -= 1
        self._events.append(Verdict(again, exits))

    def close(self) -> None:
        """Stop serving the store."""
        self._server.close()

    def _exits_that_count(self, exits: Sequence[RankExit]) -> Sequence[RankExit]:
        members: Sequence[int] = range(self._ranks)
        with contextlib.suppress(DistError), self._open_store() as store:
            members = last_members(store, self._attempt) or members
        return exits_of_first(members, exits)

    def _tell(self, news: Callable[[Store], None]) -> None:
        """Call ``news`` with the store, if it can be reached."""
        with contextlib.suppress(DistError), self._open_store() as store:
            news(store)

    def _open_store(self) -> TCPStore:
        secret = bytes.fromhex(self._secret)
        return TCPStore(HOST, self._server.port, timeout=_TELL_SECONDS, secret=secret)


def last_members(store: Store, attempt: int) -> list[int] | None:
    """Return the members of the last epoch that was agreed on in ``attempt``, by place; None where
    nothing was: they are those that the job began with.
    """
    log = last_log(store, attempt)
    if log is None:
        return None
    found: dict[int, list[int]] = {}
    for event in LogReader(store, log, parse).read(0.0):
        if isinstance(event, Agreed) and event.text != "null":
            number = epoch_number(event.name)
            if number is not None:
                found[number] = json.loads(event.text)["members"]
    return found[max(found)] if found else None


def exits_of_first(members: Sequence[int], exits: Sequence[RankExit]) -> list[RankExit]:
    """Return those of ``exits``, of ranks that failed or were stopped, that say how the job ended.

    Nothing, where the first of ``members`` has ended well: the failures of others were told when
    they came. Where it has failed because of others, theirs as well.
    """
    first = next((item for item in exits if item.rank == members[0]), None)
    if first is None:
        return []
    if first.is_cause and not first.stopped:
        return [first]
    return [item for item in exits if item.rank in members]
