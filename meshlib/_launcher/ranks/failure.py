"""The ranks' exits, the first failed rank, and its report.

All launchers use ``first_failure``: meshrun, ``spawn``, ``run_ranks`` and the engines.
"""

from __future__ import annotations

import contextlib
import enum
import json
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from meshlib._events.events import RankLost
from meshlib._launcher.ranks.bootstrap import types_of
from transport._net.limits import memory_cgroups

ECHOES = frozenset({"RankFailedError", "PeerLostError", "CommunicatorAbortedError"})
"""Errors that a rank raises because another rank failed."""


class Blame(enum.IntEnum):
    """The ways in which ranks fail; the most likely cause of the others first."""

    OWN = 0
    """By an exception from outside a call, or by a signal."""
    CALL = 1
    """By a failed call of a group, or with only an exit code."""
    ECHO = 2
    """Because another rank failed."""
    STOPPED = 3
    """A launcher told the rank to end."""


F = TypeVar("F", "RankExit", "RaisedError")


def first_failure(failures: Iterable[F]) -> F | None:
    """Return the failure that caused the others, or None if there is no failure.

    The order is by ``Blame``, then by time, then by rank.
    """
    return min(failures, key=lambda one: (one.blame, one.time, one.rank), default=None)


def _blame_of(types: Collection[str]) -> Blame:
    """Return the blame of an exception whose ``types_of`` are ``types``."""
    if not ECHOES.isdisjoint(types):
        return Blame.ECHO
    return Blame.CALL if "DistError" in types else Blame.OWN


@dataclass(frozen=True, slots=True)
class RaisedError:
    """The exception of the function of ``rank``, for ranks in another library's workers."""

    rank: int
    error: BaseException
    time: float = field(default_factory=time.monotonic)

    @property
    def blame(self) -> Blame:
        """See ``Blame``."""
        return _blame_of(types_of(self.error))


_LINE_WIDTH = 160
# The difference of this machine's wall clock and monotonic clock when this process began.
_CLOCK_OFFSET = time.time() - time.monotonic()


def wall_time() -> float:
    """Return the seconds since 1970, independent of later changes of the machine's clock."""
    return _CLOCK_OFFSET + time.monotonic()


def _moment(record: dict[str, Any]) -> float:
    # Programs in other languages may have only the wall clock.
    steady = record.get("monotonic")
    return float(record.get("time", 0.0)) if steady is None else _CLOCK_OFFSET + float(steady)


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A rank's error file: the exception that ended its program.

    ``time`` is on the clock of ``wall_time``, or 0 if the file has none. It is compared with other
    ranks' failures, so changes of the machine's clock must not affect it.
    """

    type: str
    types: tuple[str, ...]
    message: str
    traceback: str
    time: float

    @classmethod
    def load(cls, path: Path) -> ErrorRecord | None:
        """Read an error file; return None if it is missing or unreadable."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> ErrorRecord:
        """Build from a dict of JSON. Only the message is required."""
        return cls(
            type=str(record.get("type", "error")),
            types=tuple(str(name) for name in record.get("types", ())),
            message=str(record["message"]),
            traceback=str(record.get("traceback", "")),
            time=_moment(record),
        )

    @property
    def is_of_calls(self) -> bool:
        """True if a call or a group of the rank failed, so its flight record has details."""
        return "DistError" in self.types

    def summary(self) -> str:
        """Return the exception on one line."""
        first = self.message.strip().split("\n", 1)[0]
        text = f"{self.type}: {first}" if first else self.type
        return text if len(text) <= _LINE_WIDTH else text[: _LINE_WIDTH - 1] + "…"


@dataclass(frozen=True, slots=True)
class RankExit:
    """The exit of one rank. ``code`` is negative for a signal, like ``Popen.returncode``.

    ``time`` is the ``wall_time`` of the failure, from the error file or otherwise of the noticed
    exit. ``stopped``: the launcher had sent the rank a signal before.

    ``hint`` is a likely cause of a signal.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    code: int
    time: float
    stopped: bool = False
    error: ErrorRecord | None = None
    hint: str = ""

    @property
    def ok(self) -> bool:
        """True if the program ended without a failure."""
        return self.code == 0 and self.error is None

    @property
    def blame(self) -> Blame:
        """See ``Blame``; for a rank that failed."""
        if self.stopped:
            return Blame.STOPPED
        if self.error is None:
            return Blame.CALL if self.code > 0 else Blame.OWN
        return _blame_of(self.error.types)

    @property
    def is_cause(self) -> bool:
        """True if this may be the first failure."""
        return not self.ok and self.blame < Blame.ECHO

    @property
    def wrote_in_vain(self) -> bool:
        """True if the rank failed because its output no longer has a reader."""
        broken_pipe = self.error is not None and self.error.type == BrokenPipeError.__name__
        return broken_pipe or self.code == -signal.SIGPIPE

    @property
    def exit_name(self) -> str:
        """``exit code 3``, ``SIGKILL`` or ``exit code 0``."""
        return describe_code(self.code) + (f" ({self.hint})" if self.hint else "")

    @property
    def shell_code(self) -> int:
        """The exit code as reported by a shell; never 0 for a failure."""
        return 128 - self.code if self.code < 0 else (self.code & 0xFF or int(not self.ok))

    def what_happened(self) -> str:
        """Return one line: the exception, the signal or the exit code."""
        if self.stopped:
            return f"ended by meshrun ({self.exit_name})"
        if self.error is not None:
            return self.error.summary()
        return f"killed by {self.exit_name}" if self.code < 0 else self.exit_name

    @property
    def loss(self) -> RankLost:
        """The event for the other ranks."""
        if self.error is not None:
            how = f"ended with {self.error.summary()}"
        elif self.code < 0:
            how = f"was killed by {self.exit_name}"
        else:
            how = f"ended with {self.exit_name}"
        return RankLost(self.rank, how)


def describe_code(code: int) -> str:
    """Return a process's return code in words: ``exit code 1``, ``SIGSEGV``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@dataclass(frozen=True, slots=True)
class Report:
    """The text that a launcher prints after a job's failure, with the full cause at the end.

    ``error`` is a failure outside the ranks that caused theirs.
    """

    exits: Sequence[RankExit]
    error: str | None = None
    attempts: int = 1

    @property
    def cause(self) -> RankExit | None:
        """The rank that failed first, if a rank is to blame."""
        return (
            first_failure(item for item in self.exits if not item.ok)
            if self.error is None
            else None
        )

    @property
    def code(self) -> int:
        """The launcher's exit code."""
        cause = self.cause
        return cause.shell_code if cause is not None else int(self.error is not None)

    def text(self) -> str:
        """Return the report. Its last lines are the failed rank's traceback, if there is one."""
        cause = self.cause
        lines = self._others(cause)
        if self.error is not None:
            lines.append(f"meshrun: {self.error}")
        if cause is not None:
            lines += self._about(cause)
        return "".join(line + "\n" for line in lines)

    def _about(self, cause: RankExit) -> list[str]:
        where = (
            f"rank {cause.rank} on {cause.host} (local rank {cause.local_rank}, pid {cause.pid})"
        )
        how = f"was killed by {cause.exit_name}" if cause.code < 0 else f"failed: {cause.exit_name}"
        tries = f", after {self.attempts} attempts" if self.attempts > 1 else ""
        trace = cause.error.traceback.rstrip("\n") if cause.error else ""
        if not trace and cause.error:
            trace = cause.error.summary()
        return [f"meshrun: {where} {how}{tries}{':' if trace else ''}", *([trace] if trace else [])]

    def _others(self, cause: RankExit | None) -> list[str]:
        """Return one line for each way in which other ranks ended."""
        ways: dict[str, list[int]] = {}
        for item in sorted(self.exits, key=lambda item: item.rank):
            if item is not cause and not item.ok:
                ways.setdefault(item.what_happened(), []).append(item.rank)
        return [f"meshrun: {rank_list(ranks)}: {way}" for way, ranks in ways.items()]


def rank_list(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5`` for ascending ``ranks``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = ", ".join("-".join(str(end) for end in run) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


OOM_HINT = "probably the kernel's out-of-memory killer, which has just killed a process"


def oom_kills() -> int:
    """Return the number of out-of-memory kills in this process's memory cgroup.

    If the cgroup does not count them, return the machine's number, or 0 if that is unknown, too.
    Only an increase is meaningful.
    """
    for path in _counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _counters() -> Iterator[Path]:
    for folder in memory_cgroups():
        yield folder / "memory.events"
        yield folder / "memory.oom_control"
    yield Path("/proc/vmstat")
