"""The events of a job, which its ranks, launchers and monitors publish.

Each event is one line of a log in the store, which all ranks read from its beginning
(``_events.log``). ``_calls.failures.reporter`` describes the protocol. Launchers also publish
events, so this module must not import NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from meshlib._records import build, values_of
from transport._errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    RankFailedError,
)

Chain = tuple[int, int]
"""A rank's collectives on a group: the number of the last one, and the hash of all."""
Chains = Mapping[str, Chain | None]
"""Chains by the id of each group with calls; None for a broken or destroyed group."""

_ERRORS: dict[str, type[DistError]] = {
    cls.__name__: cls
    for cls in (CollectiveMismatchError, CollectiveTimeoutError, RankFailedError, DistBackendError)
}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a log; ``kind`` names the type of entry."""

    kind: ClassVar[str]

    def line(self) -> str:
        """Return the entry's line in the log."""
        return json.dumps({"kind": self.kind} | values_of(self), default=values_of) + "\n"


E = TypeVar("E", bound=LogEntry)
Parse = Callable[[bytes], E]
"""A function that returns the entry in a line."""


def reader_of(*kinds: type[E]) -> Parse[E]:
    """Return the parser of a log whose entries are of these ``kinds``."""
    by_name = {cls.kind: cls for cls in kinds}

    def parse(line: bytes) -> E:
        values: dict[str, Any] = json.loads(line)
        return build(by_name[values.pop("kind")], values)

    return parse


@dataclass(frozen=True, slots=True)
class JobEvent(LogEntry):
    """One line of a job's log."""


@dataclass(frozen=True, slots=True)
class RankLost(JobEvent):
    """The loss of ``rank``, which breaks its groups; ``how`` completes "rank 1 …".

    If ``vague``, another event may have the reason.
    """

    kind: ClassVar[str] = "rank_exit"
    rank: int
    how: str
    vague: bool = False


@dataclass(frozen=True, slots=True)
class RankEnded(JobEvent):
    """The end of the program of ``rank`` (in the launcher's numbering), which will never join."""

    kind: ClassVar[str] = "ended"
    rank: int
    how: str = "ended with exit code 0 and has not joined"


@dataclass(frozen=True, slots=True)
class Leave(JobEvent):
    """The regular departure of ``rank``; ``joined`` has the groups on which it made calls."""

    kind: ClassVar[str] = "leave"
    rank: int
    joined: Chains


@dataclass(frozen=True, slots=True)
class Query(JobEvent):
    """A query to every member of ``group`` about its state in the collective ``sequence``.

    ``ticket`` is part of the answers' keys (``answer_key``).
    """

    kind: ClassVar[str] = "query"
    group: str
    sequence: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Abort(JobEvent):
    """The abort of ``group`` on all its members.

    ``error`` is the class of their exception, with ``message``. ``lost`` is the lost rank, if any.
    """

    kind: ClassVar[str] = "abort"
    group: str
    error: str
    message: str
    lost: int | None = None

    @classmethod
    def of(cls, group: str, error: DistError) -> Self:
        """Return the event that makes all members of ``group`` raise ``error``."""
        lost = error.rank if isinstance(error, RankFailedError) else None
        return cls(group, type(error).__name__, str(error), lost)

    def exception(self) -> DistError:
        """Return the exception that the members raise."""
        cls = _ERRORS.get(self.error, DistBackendError)
        if cls is RankFailedError:
            return RankFailedError(self.message, self.lost)
        return cls(self.message)


@dataclass(frozen=True, slots=True)
class Refused(JobEvent):
    """A member's refusal of the collective ``sequence`` of ``group``, due to wrong arguments.

    ``message`` names the member, its line, and the wrong argument.
    """

    kind: ClassVar[str] = "refused"
    group: str
    sequence: int
    message: str


@dataclass(frozen=True, slots=True)
class Agreed(JobEvent):
    """The result ``text`` of the members' agreement ``name`` (``_job.continuing.agreement``)."""

    kind: ClassVar[str] = "agreed"
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Ready(JobEvent):
    """A request of ``rank``, which has no place in the job yet, for one."""

    kind: ClassVar[str] = "ready"
    rank: int


@dataclass(frozen=True, slots=True)
class Watched(JobEvent):
    """A request of the monitor ``by`` for samples every ``every`` seconds; 0 ends it."""

    kind: ClassVar[str] = "watched"
    by: str
    every: float


@dataclass(frozen=True, slots=True)
class StackRequest(JobEvent):
    """A request for the stacks of ``rank``'s threads; ``ticket`` names the answer's key."""

    kind: ClassVar[str] = "stack request"
    rank: int
    ticket: str


@dataclass(frozen=True, slots=True)
class StopRequest(JobEvent):
    """A request of ``rank`` to stop all ranks at one step; ``why`` is a signal or a reason."""

    kind: ClassVar[str] = "stop request"
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class CanStop(JobEvent):
    """The first ``step`` at which ``rank`` can stop."""

    kind: ClassVar[str] = "can stop"
    rank: int
    step: int


class Departures:
    """The sum of successive ``Leave`` events; not a line of a log.

    Ranks that are threads of a process share the object, because summing a thousand departures
    once per rank would take a million steps.
    """

    def __init__(self, leaves: Sequence[Leave]) -> None:
        self.ranks: frozenset[int] = frozenset(leave.rank for leave in leaves)
        """The ranks that have left."""
        self._chains: dict[str, dict[Chain | None, list[int]]] = {}
        for leave in leaves:
            for group, chain in leave.joined.items():
                self._chains.setdefault(group, {}).setdefault(chain, []).append(leave.rank)
        self._strangers = {
            group: self.ranks.difference(*chains.values()) for group, chains in self._chains.items()
        }

    def chains(self, group: str) -> Mapping[Chain | None, Sequence[int]]:
        """Return the chains on ``group`` of the departed ranks, each with its ranks."""
        return self._chains.get(group, {})

    def without(self, group: str) -> frozenset[int]:
        """Return the departed ranks that made no call on ``group``."""
        return self._strangers.get(group, self.ranks)


parse: Parse[
    RankLost
    | RankEnded
    | Leave
    | Query
    | Abort
    | Refused
    | Agreed
    | Ready
    | Watched
    | StackRequest
    | StopRequest
    | CanStop
] = reader_of(
    RankLost,
    RankEnded,
    Leave,
    Query,
    Abort,
    Refused,
    Agreed,
    Ready,
    Watched,
    StackRequest,
    StopRequest,
    CanStop,
)
