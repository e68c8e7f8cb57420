"""The coordinator of one node: its agent's link to the other agents of the job.

An agent is an event loop. It requests a place from its coordinator (``join``), reports the exits of
its ranks, and follows the decisions of ``poll``. Reports are records of a log, to which the leading
agent adds its decisions (``leader``). Agents of several nodes share that log (``agents_log``). An
agent of a single node leads itself (``OwnLog``).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshlib._events.log import announce_ends, announce_lost
from meshlib._launcher.nodes.continuing import last_members, leader_of
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AgentRecord,
    AttemptResult,
    CutOff,
    Interrupted,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    MoreRanksGranted,
    MoreRanksRequest,
    RankFailed,
    RanksEnded,
    StopAll,
)
from meshlib._launcher.options.launch import LaunchOptions
from meshlib._launcher.ranks.failure import RankExit
from meshlib._launcher.ranks.placement import NodePlacement
from transport._errors import DistError
from transport._store.base import Store
from transport._store.tcp.server import TCPStoreServer
from transport._store.tcp.store import TCPStore

_STORE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start the requested ``ranks`` (``want``), in addition to the running ones."""

    ranks: range


@dataclass(frozen=True, slots=True)
class Stop:
    """End the ranks because of an event on another node. ``saves``: they have time to save."""

    reason: str
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The attempt is over on all nodes: begin another one, or end with these failures.

    ``exits`` are the failed and stopped ranks of all nodes, ``error`` a failure outside the ranks
    that caused theirs.
    """

    again: bool
    exits: Sequence[RankExit] = ()
    error: str | None = None


Decision = NodePlacement | StartRanks | Stop | Verdict
"""The leader's order to an agent; on a ``NodePlacement`` it starts its ranks."""
StoreAction = Callable[[Store], None]


class AgentLog(ABC):
    """Carries records between agents, and events to their ranks. No method blocks for a long time.

    ``host``, ``port`` and ``secret`` (hexadecimal) are those of the ranks' store; if the store is
    in etcd, ``url`` is its address.
    """

    host: str
    port: int
    secret: str
    url: str = ""
    alone: bool
    _server: TCPStoreServer | None

    @property
    def serves(self) -> bool:
        """True if this node serves the store, so that the job ends with it."""
        return self._server is not None

    @abstractmethod
    def post(self, record: AgentRecord) -> None:
        """Add ``record``."""

    @abstractmethod
    def read(self) -> list[AgentRecord]:
        """Return the new records, in order."""

    @abstractmethod
    def run_on_store(self, action: StoreAction) -> None:
        """Call ``action`` with the ranks' store."""

    @abstractmethod
    def flush(self) -> None:
        """Wait briefly until the posted records are written."""

    def close(self, *, in_touch: bool) -> None:
        """Close the log. ``in_touch``: the store can be reached. Idempotent."""
        del in_touch
        if self._server is not None:
            self._server.close()


class OwnLog(AgentLog):
    """The log of a single agent, which is its own leader.

    Port 0 means any free port, so that jobs on one machine do not collide.
    """

    alone = True

    def __init__(self, options: LaunchOptions, agent: str) -> None:
        secret = os.urandom(32)
        self.host: str = "127.0.0.1"
        self.secret: str = secret.hex()
        self._server = server = TCPStoreServer(self.host, options.nodes.port, secret=secret)
        self.port: int = server.port
        self._leader = leader_of(options, agent, self._last_members)
        self._answers: list[AgentRecord] = []

    def post(self, record: AgentRecord) -> None:
        """See ``AgentLog``."""
        answers = self._leader.receive(record, time.monotonic())
        # The sender has already stopped its ranks; don't echo StopAll back.
        self._answers += [answer for answer in answers if not isinstance(answer, StopAll)]

    def read(self) -> list[AgentRecord]:
        """See ``AgentLog``."""
        answers, self._answers = self._answers, []
        return answers

    def run_on_store(self, action: StoreAction) -> None:
        """See ``AgentLog``."""
        with contextlib.suppress(DistError), self._open_store() as store:
            action(store)

    def flush(self) -> None:
        """See ``AgentLog``."""

    def _last_members(self, attempt: int) -> list[int] | None:
        with contextlib.suppress(DistError), self._open_store() as store:
            return last_members(store, attempt)
        return None

    def _open_store(self) -> TCPStore:
        secret = bytes.fromhex(self.secret)
        return TCPStore(self.host, self.port, timeout=_STORE_SECONDS, secret=secret)


class Coordinator:
    """The link between the job and the agent of one node, the launch ``agent``.

    All methods return quickly; one thread calls them.
    """

    def __init__(self, options: LaunchOptions, agent: str, log: AgentLog) -> None:
        self._options = options
        self._agent = agent
        self._log = log
        self._placement: NodePlacement | None = None
        self._running = 0
        self._ended: Sequence[RankExit] | None = None
        self._cut_off: str | None = None
        self._decisions: list[Decision] = []

    def join(self) -> None:
        """Request a place in the next attempt; the decision ``NodePlacement`` follows."""
        self._placement = self._ended = None
        nodes, host = self._options.nodes, socket.gethostname()
        self._log.post(
            JoinRequest(
                agent=self._agent,
                host=host,
                ranks=self._options.ranks,
                node=nodes.rank,
                least=nodes.least,
                most=nodes.most,
                job=nodes.job,
                on_failure=self._options.on_failure,
            )
        )

    def poll(self) -> list[Decision]:
        """Return the new records, in order."""
        for record in self._log.read():
            self._take(record)
        decisions, self._decisions = self._decisions, []
        return decisions

    @property
    def alone(self) -> bool:
        """True if all ranks run on this node."""
        return self._log.alone

    @property
    def in_touch(self) -> bool:
        """True if the leading agent also reports the result."""
        return self._cut_off is None

    def want(self, count: int) -> None:
        """Request ``count`` more ranks from the leader; the decision ``StartRanks`` follows."""
        if self._placement is not None:
            self._log.post(MoreRanksRequest(self._agent, self._placement.attempt, count))

    def failed(self, exit_: RankExit) -> None:
        """Report a failed rank of this node to the job's ranks and the other nodes."""
        if self._placement is not None:
            loss, attempt = exit_.loss, self._placement.attempt
            self._log.run_on_store(lambda store: announce_lost(store, [loss]))
            self._log.post(
                RankFailed(self._agent, attempt, exit_.rank, loss.how, echo=not exit_.is_cause)
            )

    def finished(self, ranks: Sequence[int]) -> None:
        """Report to the job's ranks that the programs of ``ranks`` on this node succeeded."""
        self._running -= len(ranks)
        if self._placement is not None and (self._running or not self.alone):
            attempt = self._placement.attempt
            self._log.run_on_store(lambda store: announce_ends(store, attempt, ranks))

    def interrupted(self, *, leaves: bool, saves: bool) -> None:
        """Report that the user ends the job, before the ranks of this node are stopped.

        ``leaves``: only this node ends, if the others can continue without it. ``saves``: the ranks
        of all nodes that end have time to save. Waits briefly until the report is written: when the
        ranks here end, ranks of other nodes fail, and the first report counts as the cause.
        """
        if self._placement is not None:
            self._log.post(Interrupted(self._agent, self._placement.attempt, leaves, saves))
            self._log.flush()

    def ended(self, exits: Sequence[RankExit], interrupted: bool, well: int = 0) -> None:
        """Report that no rank runs on this node any more; the decision ``Verdict`` follows.

        ``exits`` are the failed and stopped ranks, ``well`` is the number of successful ones.
        ``interrupted``: the user requested the end, so no attempt follows. May be called before
        this node has a place.
        """
        first = self._ended is None
        self._ended = exits if self._ended is None else self._ended
        if self._cut_off is not None:
            self._decisions.append(Verdict(False, self._ended, self._cut_off))
            return
        if self._placement is not None and first:
            self._log.post(RanksEnded(self._agent, self._placement.attempt, list(exits), well))
        all_lost = self._options.continues and not well
        if interrupted or (all_lost and not self._log.serves):
            # Other nodes may continue; this launcher may be started again.
            self._decisions.append(Verdict(False, self._ended))

    def close(self) -> None:
        """Leave the job. The leader waits some seconds for the other agents to leave."""
        self._log.post(AgentLeft(self._agent))
        self._log.close(in_touch=self._cut_off is None)

    def _take(self, record: AgentRecord) -> None:
        """Turn a record into decisions for the agent."""
        attempt = self._placement.attempt if self._placement is not None else None
        match record:
            case StopAll(attempt=about, reason=reason, saves=saves) if about == attempt:
                self._decisions.append(Stop(reason, saves))
            case AttemptResult():
                self._conclude(record)
            case JoinAccepted(agent=self._agent):
                self._begin(record)
            case MoreRanksGranted(agent=self._agent, attempt=about) if about == attempt:
                self._running += record.count
                self._decisions.append(StartRanks(range(record.first, record.first + record.count)))
            case JoinRefused(agent=self._agent, reason=reason):
                self._decisions.append(Verdict(False, (), reason))
            case AgentLeft(agent=self._agent, lost=str() as why):
                self._lose_touch(f"the leading node has declared this node lost: it {why}")
            case CutOff(reason=reason):
                self._lose_touch(reason)
            case _:
                pass

    def _begin(self, place: JoinAccepted) -> None:
        self._running = self._options.ranks
        self._placement = NodePlacement(
            attempt=place.attempt,
            node=place.node,
            nodes=place.nodes,
            first_rank=place.first,
            ranks=self._options.ranks,
            world_size=place.world_size,
            store_host=self._log.host,
            store_port=self._log.port,
            secret=self._log.secret,
            store_url=self._log.url,
        )
        self._decisions.append(self._placement)

    def _conclude(self, result: AttemptResult) -> None:
        if self._placement is not None and self._placement.attempt == result.attempt:
            self._decisions.append(Verdict(result.again, result.exits, result.error))
        elif self._placement is None and not result.again:
            if self._options.continues and not result.exits and result.error is None:
                self._decisions.append(Verdict(False))  # the job did not need it
                return
            error = result.error or "the job ended before this node could join it"
            self._decisions.append(Verdict(False, (), error))

    def _lose_touch(self, reason: str) -> None:
        if self._cut_off is not None:
            return
        self._cut_off = reason
        if self._placement is not None and self._ended is None:
            self._decisions.append(Stop(reason))  # the verdict follows when the ranks have ended
        else:
            self._decisions.append(Verdict(False, self._ended or (), reason))
