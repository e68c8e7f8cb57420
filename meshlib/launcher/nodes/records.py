"""What the agents of several nodes say to each other: lines of one log in the store.

Every agent reads the whole log, so all see the same things in the same order; the agent that
serves the store leads, by adding decisions. A record names the agent (its launch's name) or, for
a decision, the attempt that it is about.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

LOG = "meshrun/agents"
"""The log's key in the store."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log."""

    kind: ClassVar[str]

    def line(self) -> str:
        """Return the record as it is appended to the log."""
        return json.dumps({"kind": self.kind} | asdict(self)) + "\n"


@dataclass(frozen=True, slots=True)
class Hello(Record):
    """An agent asks for a place in the next attempt. ``node`` is the rank that it wants, if any."""

    kind: ClassVar[str] = "hello"
    agent: str
    host: str
    ranks: int
    node: int | None
    least: int
    most: int
    job: str


@dataclass(frozen=True, slots=True)
class Failed(Record):
    """A rank of an agent has failed; ``cause`` completes "rank 3 on host …". An ``echo`` is of
    something else that failed, of which the news may be still on its way.
    """

    kind: ClassVar[str] = "failed"
    agent: str
    attempt: int
    rank: int
    cause: str
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted(Record):
    """An agent was told to end, by Ctrl-C or a signal: so is the job."""

    kind: ClassVar[str] = "interrupted"
    agent: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ended(Record):
    """All ranks of an agent have ended; ``exits`` are those that failed or were stopped."""

    kind: ClassVar[str] = "ended"
    agent: str
    attempt: int
    exits: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class Gone(Record):
    """An agent has left the job; ``lost`` says why if it did not mean to."""

    kind: ClassVar[str] = "gone"
    agent: str
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Member(Record):
    """One node of an attempt; part of ``Round``."""

    kind: ClassVar[str] = "member"
    agent: str
    host: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Round(Record):
    """The leader's decision who takes part in an attempt, in the order of the nodes."""

    kind: ClassVar[str] = "round"
    attempt: int
    members: list[Member]

    @classmethod
    def from_values(cls, attempt: int, members: list[dict[str, Any]]) -> Round:
        """Build from JSON's values."""
        return cls(attempt, [Member(**member) for member in members])


@dataclass(frozen=True, slots=True)
class Refused(Record):
    """The leader's answer to a ``Hello`` that does not fit."""

    kind: ClassVar[str] = "refused"
    agent: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAll(Record):
    """The leader's decision that an attempt is to end."""

    kind: ClassVar[str] = "stop"
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Result(Record):
    """The leader's decision what follows an attempt that has ended everywhere.

    ``error`` is why it ended, where that was not a rank's failure.
    """

    kind: ClassVar[str] = "result"
    attempt: int
    again: bool
    exits: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    error: str | None = None


_KINDS = {
    cls.kind: cls for cls in (Hello, Failed, Interrupted, Ended, Gone, Refused, StopAll, Result)
}


def parse(line: bytes | str) -> Record:
    """Return the record in a line of the log."""
    values: dict[str, Any] = json.loads(line)
    kind = values.pop("kind")
    return Round.from_values(**values) if kind == Round.kind else _KINDS[kind](**values)


def alive_key(agent: str) -> str:
    """Return the key whose changing value shows that ``agent`` is alive."""
    return f"meshrun/alive/{agent}"
