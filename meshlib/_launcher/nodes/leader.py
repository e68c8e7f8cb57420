"""The decisions of the leading agent: membership, stopping all ranks, and the next attempt.

The leader has no side effects: it turns records and the time into records. ``agents_log`` connects
it to the agents of several nodes; the agent of a job on one node calls it directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshlib._events.events import RankLost
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AgentRecord,
    AttemptResult,
    Interrupted,
    JoinAccepted,
    JoinDeferred,
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

Outcome = tuple[bool, list[RankExit], str | None]


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason for ending an attempt. An ``echo`` has another cause, which may still be reported.

    ``saves``: ranks have time to save.
    """

    text: str
    blames_rank: bool = False
    echo: bool = False
    saves: bool = False


@dataclass(slots=True)
class AttemptState:
    """A running attempt, and the known state of its members.

    It began with ``nodes`` nodes and ``size`` ranks. ``ranks`` has all ranks assigned to each
    member, ``next`` is the first free number.
    """

    nodes: int
    size: int
    members: dict[str, JoinRequest] = field(default_factory=dict[str, JoinRequest])
    ranks: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    next: int = 0
    ended: dict[str, RanksEnded] = field(default_factory=dict[str, RanksEnded])
    lost: dict[str, str] = field(default_factory=dict[str, str])
    reason: Reason | None = None
    interrupted: bool = False
    makes_room: bool = False

    def has(self, agent: str) -> bool:
        """True if ``agent`` is a member that is not lost."""
        return agent in self.members and agent not in self.lost

    @property
    def over(self) -> bool:
        """True if no member has running ranks."""
        return all(agent in self.ended or agent in self.lost for agent in self.members)

    @property
    def exits(self) -> list[RankExit]:
        """The failed and stopped ranks of the nodes that have ended."""
        return [item for ended in self.ended.values() for item in ended.exits]


class Leader:
    """A state machine: ``receive`` each record of the log, and call ``tick`` as time passes.

    Both return the records to add to the log. Between attempts the leader gathers members. At first
    it waits ``last_call_timeout`` seconds for more than the minimum, later only for known members.
    The leader's own ``agent`` becomes node 0.
    """

    def __init__(self, options: LaunchOptions, agent: str, now: float) -> None:
        self._options = options
        self._agent = agent
        self._nodes = options.nodes
        self._number = 0
        self._restarts_left = options.max_restarts
        self._candidates: dict[str, JoinRequest] = {}
        self._expected: set[str] = set()
        self.present: set[str] = set()
        """The agents that have arrived and not left."""
        self._attempt: AttemptState | None = None
        self._gathering_since = now
        self._enough_since: float | None = None
        self._done = False
        self._serves = agent if not self._nodes.etcd else None
        """The agent without which the job ends, because it serves the store."""

    def ranks_of(self, agent: str) -> Sequence[int]:
        """Return the ranks of ``agent`` in the current attempt."""
        return self._attempt.ranks.get(agent, ()) if self._attempt else ()

    def losses(self, record: AgentRecord) -> list[RankLost]:
        """Return the ranks that ``record`` reports as lost, for the ranks that wait for them."""
        if not isinstance(record, AgentLeft) or record.lost is None:
            return []
        how = f"was lost: its node {record.lost}"
        return [RankLost(rank, how) for rank in self.ranks_of(record.agent)]

    def receive(self, record: AgentRecord, now: float) -> list[AgentRecord]:
        """Process a record of the log; return the resulting decisions."""
        if isinstance(record, JoinRequest):
            return self._join(record, now)
        if isinstance(record, AgentLeft):
            return self._left(record, now)
        attempt = self._attempt
        if attempt is None or getattr(record, "attempt", None) != self._number:
            return []
        match record:
            case RankFailed():
                return self._failed(attempt, record)
            case Interrupted():
                return self._interrupted(attempt, record)
            case MoreRanksRequest():
                return self._more_ranks(attempt, record)
            case RanksEnded():
                return self._ended(attempt, record, now)
            case _:
                return []

    def tick(self, now: float) -> list[AgentRecord]:
        """Return the decisions that are due at the time ``now``."""
        if self._attempt is not None or self._done:
            return []
        nodes, since = self._nodes, self._enough_since
        if since is not None and now - since >= nodes.last_call_timeout:
            return self._begin()
        if now - self._gathering_since >= nodes.join_timeout:
            have = ", ".join(request.host for request in self._candidates.values())
            return self._finish(
                f"waited {nodes.join_timeout:g} s for {nodes.least} nodes;"
                f" {len(self._candidates)} arrived: {have}"
            )
        return []

    def take_over(self, past: Sequence[AgentRecord], now: float) -> list[AgentRecord]:
        """Lead a job whose log so far is ``past``; return the decisions that are due.

        Decisions in it are final. The earlier leader may have ended before it answered the last
        records.
        """
        requested: list[MoreRanksRequest] = []
        held: set[str] = set()
        stopped = -1
        for record in past:
            match record:
                case JoinRequest(agent=agent) if not self._done:
                    self.present.add(agent)
                    self._candidates[agent] = record
                case JoinRefused(agent=agent):
                    self.present.discard(agent)
                    self._candidates.pop(agent, None)
                case JoinDeferred(agent=agent):
                    held.add(agent)
                case JoinAccepted():
                    self._recall_place(record)
                case AgentLeft(agent=agent):
                    self._forget(agent)
                case AttemptResult(again=False):
                    self._done, self._attempt = True, None
                case AttemptResult():
                    held.clear()
                case StopAll(attempt=number):
                    stopped = number
                case _:
                    pass
            if (
                self._attempt is not None
                and getattr(record, "attempt", self._number) == self._number
            ):
                self._recall(self._attempt, record, requested, now)
        # A node that arrives after the end of the job reads the result in the log.
        return [] if self._done else self._due(requested, stopped, held, now)

    def _recall(
        self,
        attempt: AttemptState,
        record: AgentRecord,
        requested: list[MoreRanksRequest],
        now: float,
    ) -> None:
        """Apply the effects of ``record`` to ``attempt``."""
        match record:
            case RankFailed():
                self._failed(attempt, record)
            case Interrupted():
                self._interrupted(attempt, record)
            case AgentLeft(agent=agent) if attempt.has(agent):
                self._without(attempt, record)
            case RanksEnded(agent=agent) if attempt.has(agent):
                attempt.ended[agent] = record
            case MoreRanksRequest():
                requested.append(record)
            case MoreRanksGranted(agent=agent, first=first, count=count):
                attempt.ranks[agent] += range(first, first + count)
                attempt.next = max(attempt.next, first + count)
                requested.remove(next(one for one in requested if one.agent == agent))
            case StopAll(reason=text, saves=saves) if attempt.reason is None:
                # All other reasons come from earlier records.
                attempt.reason, attempt.makes_room = Reason(text, saves=saves), True
            case AttemptResult(again=True):
                self._regather(attempt, self._outcome(attempt)[0], now)
                requested.clear()
            case _:
                pass

    def _recall_place(self, place: JoinAccepted) -> None:
        if self._attempt is None:
            self._number = place.attempt
            self._attempt = AttemptState(place.nodes, place.world_size)
        attempt, request = self._attempt, self._candidates.pop(place.agent)
        attempt.members[place.agent] = request
        attempt.ranks[place.agent] = list(range(place.first, place.first + request.ranks))
        attempt.next = max(attempt.next, place.first + request.ranks)

    def _due(
        self, requested: list[MoreRanksRequest], stopped: int, held: set[str], now: float
    ) -> list[AgentRecord]:
        """Return the decisions that the earlier leader did not make."""
        due: list[AgentRecord] = []
        attempt, reason = self._attempt, self._attempt and self._attempt.reason
        if reason is not None and stopped != self._number:
            due.append(StopAll(self._number, reason.text, reason.saves))
        if attempt is not None:
            for record in requested:
                due += self._more_ranks(attempt, record)
        pending = [request for agent, request in self._candidates.items() if agent not in held]
        for request in pending:
            del self._candidates[request.agent]
        if attempt is not None:
            for request in pending:
                due += self._join(request, now)
            return due + self._fill(attempt) + self._settle(attempt, now)
        for request in pending:
            if (problem := self._problem(request)) is not None:
                self.present.discard(request.agent)
                due.append(JoinRefused(request.agent, problem))
            else:
                self._candidates[request.agent] = request
        return due + (self._gather(now) if self._candidates else [])

    def _join(self, request: JoinRequest, now: float) -> list[AgentRecord]:
        problem = self._problem(request)
        if problem is not None:
            return [JoinRefused(request.agent, problem)]
        self.present.add(request.agent)
        self._candidates[request.agent] = request
        if self._attempt is None:
            return self._gather(now)
        return self._join_late(self._attempt, request)

    def _join_late(self, attempt: AttemptState, request: JoinRequest) -> list[AgentRecord]:
        if attempt.ended or attempt.reason is not None:
            return []  # the job is about to end or to restart
        if len(attempt.members) >= self._nodes.most:
            del self._candidates[request.agent]
            self.present.discard(request.agent)
            return [JoinRefused(request.agent, f"the job already has {self._nodes.most} nodes")]
        attempt.makes_room = True
        return self._stop(attempt, Reason(f"another node ({request.host}) joins"))

    def _problem(self, request: JoinRequest) -> str | None:
        nodes, on_failure = self._nodes, self._options.on_failure
        if self._done:
            return "the job has ended"
        if request.job != nodes.job:
            return f"the job here is --rdzv-id {nodes.job}, not {request.job}"
        if (request.least, request.most) != (nodes.least, nodes.most):
            return (
                f"--nnodes is {request.least}:{request.most} there,"
                f" but {nodes.least}:{nodes.most} on the leading node"
            )
        if request.on_failure != on_failure:
            return (
                f"--on-failure is {request.on_failure} there, but {on_failure} on the leading node"
            )
        for other in self._candidates.values():
            same_node = request.node is not None and request.node == other.node
            if same_node and other.agent != request.agent:
                return f"--node-rank {request.node} is taken by {other.host}"
        return None

    def _gather(self, now: float) -> list[AgentRecord]:
        count = len(self._candidates)
        if count == self._nodes.most:
            return self._begin()
        if count < self._nodes.least:
            self._enough_since = None
            return []
        if self._expected and self._expected <= set(self._candidates):
            return self._begin()
        self._enough_since = now
        return []

    def _begin(self) -> list[AgentRecord]:
        ordered = _in_order(list(self._candidates.values()), self._agent)
        self._attempt = AttemptState(len(ordered), sum(request.ranks for request in ordered))
        self._candidates.clear()
        self._enough_since = None
        return [self._admit(self._attempt, request) for request in ordered]

    def _admit(self, attempt: AttemptState, request: JoinRequest) -> AgentRecord:
        """Admit an agent as the next node, with the next ranks."""
        node, first = len(attempt.members), attempt.next
        attempt.next += request.ranks
        attempt.members[request.agent] = request
        attempt.ranks[request.agent] = list(range(first, attempt.next))
        return JoinAccepted(request.agent, self._number, node, attempt.nodes, first, attempt.size)

    def _failed(self, attempt: AttemptState, record: RankFailed) -> list[AgentRecord]:
        text = f"rank {record.rank} on {self._name(record.agent)} {record.cause}"
        return self._stop(attempt, Reason(text, blames_rank=True, echo=record.echo))

    def _more_ranks(self, attempt: AttemptState, record: MoreRanksRequest) -> list[AgentRecord]:
        """Return no decision, because the number of ranks is fixed here."""
        del attempt, record
        return []

    def _ended(self, attempt: AttemptState, record: RanksEnded, now: float) -> list[AgentRecord]:
        if not attempt.has(record.agent):
            return []
        attempt.ended[record.agent] = record
        return self._settle(attempt, now)

    def _interrupted(self, attempt: AttemptState, record: Interrupted) -> list[AgentRecord]:
        attempt.interrupted = True
        text = f"{self._name(record.agent)} was interrupted"
        return self._stop(attempt, Reason(text, saves=record.saves))

    def _left(self, record: AgentLeft, now: float) -> list[AgentRecord]:
        self._forget(record.agent)
        attempt = self._attempt
        if attempt is None:
            return self._gather(now) if self._candidates and not self._done else []
        if not attempt.has(record.agent):
            return []
        decisions = self._without(attempt, record) + self._fill(attempt)
        return decisions + self._settle(attempt, now)

    def _forget(self, agent: str) -> None:
        self.present.discard(agent)
        self._candidates.pop(agent, None)
        self._expected.discard(agent)

    def _fill(self, attempt: AttemptState) -> list[AgentRecord]:
        """Return the decisions that replace lost nodes with waiting ones."""
        del attempt
        return []

    def _without(self, attempt: AttemptState, record: AgentLeft) -> list[AgentRecord]:
        if record.lost is None:
            # It left before the job's end on purpose, as if it had been told to end.
            attempt.ended.setdefault(record.agent, RanksEnded(record.agent, self._number))
            return self._interrupted(attempt, Interrupted(record.agent, self._number))
        attempt.lost[record.agent] = record.lost
        return self._stop(attempt, Reason(f"{self._name(record.agent)} {record.lost}"))

    def _stop(self, attempt: AttemptState, reason: Reason) -> list[AgentRecord]:
        """End the attempt for ``reason``, which replaces only an earlier reason that is an echo."""
        known = attempt.reason
        if known is None or (known.echo and not reason.echo):
            attempt.reason = reason
        return [StopAll(self._number, reason.text, reason.saves)] if known is None else []

    def _settle(self, attempt: AttemptState, now: float) -> list[AgentRecord]:
        """Decide on the next step when no rank runs on any node."""
        if not attempt.over:
            return []
        failed, exits, error = self._outcome(attempt)
        if attempt.interrupted or (failed and self._restarts_left == 0):
            return self._finish(error, exits)
        if not exits and not failed:
            return self._finish(None)
        self._regather(attempt, failed, now)
        return [AttemptResult(self._number - 1, again=True, exits=exits, error=error)]

    def _regather(self, attempt: AttemptState, failed: bool, now: float) -> None:
        """Gather members for another attempt."""
        self._restarts_left -= failed
        self._expected = set(attempt.members) - set(attempt.lost) | set(self._candidates)
        self._attempt = None
        self._gathering_since = now
        self._number += 1

    def _outcome(self, attempt: AttemptState) -> Outcome:
        """Return whether the attempt has failed, its exits, and the error if no rank caused it."""
        exits, reason = attempt.exits, attempt.reason
        error = None if reason is None or reason.blames_rank else reason.text
        return bool(attempt.lost) or (bool(exits) and not attempt.makes_room), exits, error

    def _finish(self, error: str | None, exits: Sequence[RankExit] = ()) -> list[AgentRecord]:
        self._done = True
        self._attempt = None
        return [AttemptResult(self._number, again=False, exits=list(exits), error=error)]

    def _name(self, agent: str) -> str:
        """Return a member's name in messages: ``node 1 (host)``."""
        members = list(self._attempt.members) if self._attempt else []
        if self._attempt is None or agent not in members:
            return f"node {agent}"
        return f"node {members.index(agent)} ({self._attempt.members[agent].host})"


def _in_order(requests: list[JoinRequest], leader: str) -> list[JoinRequest]:
    """Return the nodes by their numbers.

    Nodes that requested a number get it, if the number of nodes allows. The others fill the gaps in
    the order of arrival, the leader first.
    """
    by_node = {request.node: request for request in requests if request.node is not None}
    others = [request for request in requests if request.node is None]
    others.sort(key=lambda request: request.agent != leader)
    order: list[JoinRequest] = []
    for node in range(max([len(requests), *(node + 1 for node in by_node)])):
        if node in by_node:
            order.append(by_node[node])
        elif others:
            order.append(others.pop(0))
    return order
