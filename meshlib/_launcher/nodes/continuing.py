"""The decisions of the leading agent, for a job whose ranks continue when others are lost.

If a rank is lost, its node may start a replacement. If a node is lost, its ranks are lost as well.
The ranks of a node that joins later join the running ranks. The leader assigns every new rank an
unused number.

The job's result is that of its first member, rank 0 at the beginning. After an epoch without rank 0
(``shrink_group``, ``ElasticMesh``) it is the first member of that epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from meshlib._events.events import Agreed, RankLost, parse
from meshlib._events.log import LogReader, last_log
from meshlib._job.membership import epoch_number
from meshlib._launcher.nodes.leader import AttemptState, Leader, Outcome
from meshlib._launcher.nodes.records import (
    AgentLeft,
    AgentRecord,
    Interrupted,
    JoinDeferred,
    JoinRequest,
    MoreRanksGranted,
    MoreRanksRequest,
    RankFailed,
    RanksEnded,
)
from meshlib._launcher.options.launch import LaunchOptions
from meshlib._launcher.ranks.failure import RankExit
from transport._store.base import Store

LastMembers = Callable[[int], Sequence[int] | None]
"""Returns the members of an attempt's last epoch, by place; None: those of its beginning."""


def leader_of(options: LaunchOptions, agent: str, last_members: LastMembers) -> Leader:
    """Return the leader of the job described by ``options``."""
    now = time.monotonic()
    if options.continues:
        return ContinuingLeader(options, agent, now, last_members)
    return Leader(options, agent, now)


class ContinuingLeader(Leader):
    """A ``Leader`` that ends an attempt only if all ranks have ended or the user requests it."""

    def __init__(
        self, options: LaunchOptions, agent: str, now: float, last_members: LastMembers
    ) -> None:
        super().__init__(options, agent, now)
        self._last_members = last_members

    def losses(self, record: AgentRecord) -> list[RankLost]:
        """Return the ranks that ``record`` reports as lost, including those of a node that alone
        was interrupted.
        """
        if (
            isinstance(record, RanksEnded)
            and self._attempt is not None
            and not self._attempt.reason
        ):
            ranks = [item.rank for item in record.exits if item.stopped]
            return [RankLost(rank, "was ended with its node") for rank in ranks]
        return super().losses(record)

    def _join_late(self, attempt: AttemptState, request: JoinRequest) -> list[AgentRecord]:
        if attempt.reason is not None or self._is_ending(attempt):
            return []
        if len(self._running(attempt)) >= self._nodes.most:
            reason = f"the job runs on {self._nodes.most} nodes: waiting until one of them is lost"
            return [JoinDeferred(request.agent, reason)]
        del self._candidates[request.agent]
        return [self._admit(attempt, request)]

    def _running(self, attempt: AttemptState) -> list[str]:
        """Return the members with running ranks."""
        gone = attempt.ended.keys() | attempt.lost.keys()
        return [agent for agent in attempt.members if agent not in gone]

    def _is_ending(self, attempt: AttemptState) -> bool:
        """True if ranks have finished their program."""
        return any(one.well for one in attempt.ended.values())

    def _failed(self, attempt: AttemptState, record: RankFailed) -> list[AgentRecord]:
        del attempt, record
        return []

    def _more_ranks(self, attempt: AttemptState, record: MoreRanksRequest) -> list[AgentRecord]:
        if record.agent not in self._running(attempt) or attempt.reason is not None:
            return []
        first, attempt.next = attempt.next, attempt.next + record.count
        attempt.ranks[record.agent] += range(first, attempt.next)
        return [MoreRanksGranted(record.agent, self._number, first, record.count)]

    def _interrupted(self, attempt: AttemptState, record: Interrupted) -> list[AgentRecord]:
        if record.leaves and record.agent != self._serves:
            return []  # its ranks count as lost when they have ended
        return super()._interrupted(attempt, record)

    def _without(self, attempt: AttemptState, record: AgentLeft) -> list[AgentRecord]:
        if record.agent == self._serves:
            return super()._without(attempt, record)
        attempt.lost[record.agent] = record.lost or "has left"
        return []

    def _fill(self, attempt: AttemptState) -> list[AgentRecord]:
        decisions: list[AgentRecord] = []
        for request in list(self._candidates.values()):
            if len(self._running(attempt)) < self._nodes.most:
                decisions += self._join_late(attempt, request)
        return decisions

    def _outcome(self, attempt: AttemptState) -> Outcome:
        if attempt.reason is not None:
            return super()._outcome(attempt)
        members = self._last_members(self._number) or range(attempt.size)
        for agent, how in attempt.lost.items():
            if members[0] in attempt.ranks[agent] and agent not in attempt.ended:
                return True, [], f"{self._name(agent)} {how}"
        found = exits_of_first(members, attempt.exits)
        return bool(found), found, None


def last_members(store: Store, attempt: int) -> list[int] | None:
    """Return the members of the last agreed epoch of ``attempt``, by place.

    None if there was no agreement: the members are those that began the job.
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
    """Return the entries of ``exits`` (of failed or stopped ranks) that decide the job's result.

    No entry if the first of ``members`` succeeded: other failures have already been reported. All
    members' entries if the first member failed because of others.
    """
    first = next((item for item in exits if item.rank == members[0]), None)
    if first is None:
        return []
    if first.is_cause and not first.stopped:
        return [first]
    return [item for item in exits if item.rank in members]
