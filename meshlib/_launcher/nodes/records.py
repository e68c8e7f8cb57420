"""The records that the agents of several nodes exchange: lines of one log in the store.

Every agent reads the whole log, so all agents get the same records in the same order. One agent
leads and adds decisions: the agent that serves the store, or any agent if no node does. A record
has the agent (the name of its launch) or, for a decision, the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from meshlib._events.events import LogEntry, Parse, reader_of
from meshlib._launcher.ranks.failure import RankExit

LOG = "meshrun/agents"
"""The log's key in the store."""


@dataclass(frozen=True, slots=True)
class AgentRecord(LogEntry):
    """One line of the log. The name of its class is its kind."""

    kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__


@dataclass(frozen=True, slots=True)
class JoinRequest(AgentRecord):
    """An agent requests a place in the next attempt, perhaps with the number ``node``."""

    agent: str
    host: str
    ranks: int
    node: int | None
    least: int
    most: int
    job: str
    on_failure: str = "stop"


@dataclass(frozen=True, slots=True)
class RankFailed(AgentRecord):
    """A rank of an agent has failed; ``cause`` completes "rank 3 on host …".

    An ``echo`` is the effect of another failure, whose record may arrive later.
    """

    agent: str
    attempt: int
    rank: int
    cause: str
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted(AgentRecord):
    """An agent was interrupted by Ctrl-C or a signal, which ends the job.

    ``leaves``: the job ends only if it cannot continue without this node. ``saves``: the ranks of
    all nodes have time to save.
    """

    agent: str
    attempt: int
    leaves: bool = False
    saves: bool = False


@dataclass(frozen=True, slots=True)
class MoreRanksRequest(AgentRecord):
    """An agent requests the numbers of ``count`` more ranks, as replacements or spares."""

    agent: str
    attempt: int
    count: int


@dataclass(frozen=True, slots=True)
class RanksEnded(AgentRecord):
    """All ranks of an agent have ended: ``well`` succeeded, ``exits`` failed or were stopped."""

    agent: str
    attempt: int
    exits: list[RankExit] = field(default_factory=list[RankExit])
    well: int = 0


@dataclass(frozen=True, slots=True)
class AgentLeft(AgentRecord):
    """An agent has left the job; ``lost`` is the reason if it did not leave on purpose."""

    agent: str
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class JoinRefused(AgentRecord):
    """The leader's answer to a ``JoinRequest`` that does not match the job."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class MoreRanksGranted(AgentRecord):
    """The leader's answer to ``MoreRanksRequest``: the ranks from ``first`` on."""

    agent: str
    attempt: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class JoinAccepted(AgentRecord):
    """The leader's answer to a ``JoinRequest``: the agent's place in an attempt.

    It is node number ``node``, with the ranks from ``first`` on. The attempt begins, or has begun,
    with ``nodes`` and ``world_size``.
    """

    agent: str
    attempt: int
    node: int
    nodes: int
    first: int
    world_size: int


@dataclass(frozen=True, slots=True)
class JoinDeferred(AgentRecord):
    """The leader's answer to a ``JoinRequest`` while all places are taken: the agent waits."""

    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAll(AgentRecord):
    """The leader's decision that an attempt is to end. ``saves``: ranks have time to save."""

    attempt: int
    reason: str
    saves: bool = False


@dataclass(frozen=True, slots=True)
class AttemptResult(AgentRecord):
    """The leader's decision about the next step, after an attempt has ended on all nodes.

    ``error`` is the reason for the end if it was not a rank's failure.
    """

    attempt: int
    again: bool
    exits: list[RankExit] = field(default_factory=list[RankExit])
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Knock(AgentRecord):
    """An agent checks whether the job in this store is alive, before it joins (``etcd_log``)."""

    agent: str


@dataclass(frozen=True, slots=True)
class Leads(AgentRecord):
    """The agent leads, and has made the decisions that follow.

    After the first record of a new term, decisions from earlier terms are void.
    """

    agent: str
    term: int


@dataclass(frozen=True, slots=True)
class CutOff(AgentRecord):
    """This node has lost the connection to the log. Not written to the log."""

    reason: str


parse: Parse[AgentRecord] = reader_of(
    JoinRequest,
    RankFailed,
    Interrupted,
    MoreRanksRequest,
    RanksEnded,
    AgentLeft,
    JoinRefused,
    MoreRanksGranted,
    JoinAccepted,
    JoinDeferred,
    StopAll,
    AttemptResult,
    Knock,
    Leads,
)


def alive_key(agent: str) -> str:
    """Return the key whose changing value shows that ``agent`` is alive."""
    return f"meshrun/alive/{agent}"


def answer_key(agent: str) -> str:
    """Return the key that the leader writes when ``agent`` knocks."""
    return f"meshrun/answer/{agent}"


def is_decision(record: AgentRecord) -> bool:
    """True if the leader wrote ``record``, not the agent in it."""
    if isinstance(record, AgentLeft):
        return record.lost is not None
    return isinstance(
        record,
        JoinRefused | JoinDeferred | JoinAccepted | MoreRanksGranted | StopAll | AttemptResult,
    )
