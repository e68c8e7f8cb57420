"""The events of a job, which its ranks, launchers and monitors publish.

Each event is one line of a log in the store, which all ranks read from its beginning
(``events.log``). ``calls.failures.reporter`` describes the protocol. Nothing here needs NumPy:
launchers publish events, too.
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
"""The end of a rank's chain of calls on a group: the last collective's number, the hash of all."""
Chains = Mapping[str, Chain | None]
"""By the id of each group on which calls were made; None: the group broke, or is gone already."""

_ERRORS: dict[str, type[DistError]] = {
    cls.__name__: cls
    for cls in (CollectiveMismatchError, CollectiveTimeoutError, RankFailedError, DistBackendError)
}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a log; ``kind`` is its kind."""

    kind: ClassVar[str]

    def line(self) -> str:
        """Return the entry as it is appended to the log."""
        return json.dumps({"kind": self.kind} | values_of(self), default=values_of) + "\n"


E = TypeVar("E", bound=LogEntry)
Parse = Callable[[bytes], E]
"""Returns the entry in a line."""


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
    """``rank`` is gone, and breaks its groups; ``how`` completes "rank 1 …".

    ``vague``: another event may give the reason.
    """

    kind: ClassVar[str] = "rank_exit"
    rank: int
    how: str
    vague: bool = False


@dataclass(frozen=True, slots=True)
class RankEnded(JobEvent):
    """The program of ``rank``, in the launcher's numbering, has ended: it will never come."""

    kind: ClassVar[str] = "ended"
    rank: int
    how: str = "ended with exit code 0 and has not joined"


@dataclass(frozen=True, slots=True)
class Leave(JobEvent):
    """``rank`` has left in good order; ``joined`` are the groups that it has made calls on."""

    kind: ClassVar[str] = "leave"
    rank: int
    joined: Chains


@dataclass(frozen=True, slots=True)
class Query(JobEvent):
    """Every member of ``group`` is asked for a statement about the collective ``sequence``.

    ``ticket`` says where the answer goes (``answer_key``).
    """

    kind: ClassVar[str] = "query"
    group: str
    sequence: int
    ticket: str


@dataclass(frozen=True, slots=True)
class Abort(JobEvent):
    """``group`` is broken on all its members.

    ``error`` is the class of their exception, with ``message``. ``lost`` is the lost rank, if any.
    """

    kind: ClassVar[str] = "abort"
    group: str
    error: str
    message: str
    lost: int | None = None

    @classmethod
    def of(cls, group: str, error: DistError) -> Self:
        """Return the event that has all members of ``group`` raise ``error``."""
        lost = error.rank if isinstance(error, RankFailedError) else None
        return cls(group, type(error).__name__, str(error), lost)

    def exception(self) -> DistError:
        """Return the exception of the members."""
        cls = _ERRORS.get(self.error, DistBackendError)
        if cls is RankFailedError:
            return RankFailedError(self.message, self.lost)
        return cls(self.message)


@dataclass(frozen=True, slots=True)
class Refused(JobEvent):
    """A member of ``group`` does not make the collective ``sequence``: its arguments are wrong.

    ``message`` names the member, its line, and the wrong argument.
    """

    kind: ClassVar[str] = "refused"
    group: str
    sequence: int
    message: str


@dataclass(frozen=True, slots=True)
class Agreed(JobEvent):
    """Members have settled the agreement ``name`` (``job.continuing.agreement``) on ``text``."""

    kind: ClassVar[str] = "agreed"
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Ready(JobEvent):
    """``rank``, which has no place in the job so far, waits for one."""

    kind: ClassVar[str] = "ready"
    rank: int


@dataclass(frozen=True, slots=True)
class Watched(JobEvent):
    """The monitor ``by`` wants a sample of each rank every ``every`` seconds; 0: no more."""

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
    """``rank`` requests that all ranks stop at one step; ``why`` is a signal's name or a reason."""

    kind: ClassVar[str] = "stop request"
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class CanStop(JobEvent):
    """``rank`` can stop at ``step``, but at no earlier one."""

    kind: ClassVar[str] = "can stop"
    rank: int
    step: int


class Departures:
    """Ranks have left in good order: no line, but the sum of successive ``Leave`` events.

    Ranks that are threads of a process share the object. With a thousand ranks, sorting out the
    departures once for each of them would take a million steps.
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
        """Return the ends of their chains of calls on ``group``, each with its ranks."""
        return self._chains.get(group, {})

    def without(self, group: str) -> frozenset[int]:
        """Return the ranks among them without a call on ``group``."""
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
