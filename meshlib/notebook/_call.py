"""One call on some ranks, from its start to its results."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from meshlib._calls.future import Future
from meshlib._launcher.ranks.failure import ErrorRecord, RankExit, first_failure, rank_list
from meshlib.notebook._control import Reply, Task
from meshlib.notebook._functions import unpack
from meshlib.notebook._output import Answered, Marked
from meshlib.rpc import RpcTimeoutError, WorkerLostError
from meshlib.testing import RankError
from transport._errors import RankFailedError

_OTHERS_SECONDS = 0.8
"""How long the other ranks may take to end by themselves after a failure, as in meshrun."""
STOP_SECONDS = 5.0
"""How long ranks may take to end an interrupted task."""
MARK_SECONDS = 2.0
"""The longest wait for marks of an output's end; the program may have closed the output."""


class CallLink(Protocol):
    """The part of the notebook's link that a call uses."""

    def start(self, tasks: Mapping[int, Task], calls: dict[int, Future[Reply]]) -> None:
        """Begin ``tasks``, by rank, and put them into ``calls``; ``Answered`` follows for each."""
        ...

    def interrupt(self, ranks: Sequence[int], number: int) -> None:
        """Interrupt the task ``number`` on ``ranks``."""
        ...

    def stacks(self, ranks: Mapping[int, object]) -> str:
        """Return the stacks of ``ranks`` as text."""
        ...

    def next_event(self, until: float) -> object:
        """Show printed lines; return the next other event, or None at the time ``until``."""
        ...

    def marks(self, ranks: Sequence[int], number: int) -> set[Marked]:
        """Return the marks that end the output of ``ranks`` in task ``number``."""
        ...

    def call_failed(self, made_calls: bool, late: Mapping[int, Future[Reply]]) -> None:
        """Record the effects of a failed call: unfinished ranks, and groups out of step."""
        ...

    def lose(self, error: WorkerLostError) -> RankFailedError:
        """Close the link after the loss of a rank; return the error to raise."""
        ...


class RankCall:
    """One call on some ranks, from its start to its results."""

    def __init__(
        self,
        link: CallLink,
        number: int,
        tasks: Mapping[int, Task],
        seconds: float | None,
    ) -> None:
        self._link = link
        self._number = number
        self._seconds = seconds
        self._until = float("inf") if seconds is None else time.monotonic() + seconds
        self._calls: dict[int, Future[Reply]] = {}
        self._replies: dict[int, Reply] = {}
        self._stopped: set[int] = set()
        self._marks: set[Marked] = set()
        self._tasks = tasks

    def results(self) -> dict[int, Any]:
        """Run the call; return its results by rank, or raise its error."""
        try:
            self._link.start(self._tasks, self._calls)
            self._wait()
            self._await_marks()
            error = self._error()
            if error is not None:
                raise error
        except WorkerLostError as lost:
            raise self._link.lose(lost) from lost
        except KeyboardInterrupt:
            self._stop(list(self._tasks))  # a started one may be missing in the calls
            raise
        finally:
            self._settle()
        replies = sorted(self._replies.items())
        return {
            rank: None if reply.value is None else unpack(reply.value) for rank, reply in replies
        }

    def _wait(self) -> None:
        """Wait for all replies; after a failure interrupt ranks that do not end by themselves."""
        while waiting := self._waiting():
            due = self._until
            failed = any(reply.description for reply in self._replies.values())
            if failed and not self._stopped:
                due = min(due, time.monotonic() + _OTHERS_SECONDS)
            event = self._next(due)
            if event is not None:
                continue
            if self._stopped or not failed:
                return
            self._stop(waiting)
            self._until = time.monotonic() + STOP_SECONDS

    def _waiting(self) -> list[int]:
        return [rank for rank in self._calls if rank not in self._replies]

    def _next(self, until: float) -> object:
        event = self._link.next_event(until)
        match event:
            case Answered(rank) if rank in self._calls and self._calls[rank].done():
                self._replies[rank] = self._calls[rank].wait()
            case Marked(_, _, number) if number == self._number:
                self._marks.add(event)
            case _:
                pass
        return event

    def _stop(self, ranks: Sequence[int]) -> None:
        """Interrupt ``ranks``, and wait for them for up to ``STOP_SECONDS``."""
        ranks = [rank for rank in ranks if rank not in self._replies]
        self._stopped.update(ranks)
        self._link.interrupt(ranks, self._number)
        until = time.monotonic() + STOP_SECONDS
        while self._waiting() and self._next(until) is not None:
            pass
        self._await_marks()

    def _await_marks(self) -> None:
        """Show the complete output of all ranks that have replied."""
        marks = self._link.marks(list(self._replies), self._number)
        until = time.monotonic() + MARK_SECONDS
        while not marks <= self._marks and self._next(until) is not None:
            pass

    def _settle(self) -> None:
        """Record the state that the next call needs."""
        late = {rank: self._calls[rank] for rank in self._waiting()}
        made_calls = any(reply.made_calls for reply in self._replies.values())
        self._link.call_failed(made_calls, late)

    def _error(self) -> Exception | None:
        """Return the error of the rank that failed first, or a timeout error; None for neither."""
        failures: list[RankExit] = []
        for rank, reply in self._replies.items():
            if reply.description is not None:
                record = ErrorRecord.from_dict(reply.description)
                stopped = rank in self._stopped
                failures.append(RankExit(rank, rank, "", 0, 1, record.time, stopped, record))
        first = first_failure(failures)
        if first is None or first.error is None:
            waiting = self._waiting()
            if not waiting:
                return None
            where = self._link.stacks(dict.fromkeys(waiting))
            self._stop(waiting)
            return RpcTimeoutError(
                f"not done after {self._seconds:g} s: {rank_list(waiting)}\n{where}"
            )
        text = f"rank {first.rank} raised {first.error.summary()}\n\n{first.error.traceback}"
        error = RankError(text.rstrip(), first.rank)
        packed = self._replies[first.rank].error
        if packed is not None:
            with suppress(Exception):
                error.__cause__ = unpack(packed)
        return error
