"""The processes behind ``spawn``, seen from their parent, and what runs in each."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from meshlib.launcher.nodes.coordinator import OneNode
from meshlib.launcher.ranks.bootstrap import describe_error, die_with_parent
from meshlib.launcher.ranks.ending import (
    FAILURE_GRACE_SECONDS,
    SETTLE_AFTER_ECHO_SECONDS,
    SETTLE_SECONDS,
    Ending,
)
from meshlib.launcher.ranks.failure import (
    ErrorRecord,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    RankExit,
    first_failure,
    wall_time,
)
from transport.deadline import Deadline

_KILL_SECONDS = 10.0
"""What the kernel may take to end a process that was killed."""


class ProcessContext:
    """The processes of one ``spawn`` and the store that they use; made by ``spawn``."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, daemon: bool
    ) -> None:
        self._node = OneNode(nprocs, max_restarts=0)
        placement = self._node.place()
        self._children: list[_Child] = []
        self._daemon = daemon
        try:
            for rank in range(nprocs):
                variables = placement.variables(os.environ) | placement.variables_of(rank)
                self._children.append(_Child(fn, args, rank, variables, daemon))
        except BaseException:
            self.close()
            raise
        atexit.register(self._at_exit)

    @property
    def processes(self) -> list[SpawnProcess]:
        """The processes, by rank."""
        return [child.process for child in self._children]

    @property
    def running(self) -> list[_Child]:
        """The ranks that have not ended."""
        return [child for child in self._children if child.look()]

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [child.process.pid or 0 for child in self._children]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all ranks have ended; return False after ``timeout`` seconds.

        When a rank fails, end the others, which get ``grace_period`` seconds (default 3) between
        SIGTERM and SIGKILL, and raise the ``ProcessException`` of the first that failed.
        """
        deadline = None if timeout is None else Deadline.after(timeout)
        while running := self.running:
            if first := first_failure(self._failures()):
                self._node.failed(first)
                settle = SETTLE_SECONDS if first.is_cause else SETTLE_AFTER_ECHO_SECONDS
                self.end(FAILURE_GRACE_SECONDS if grace_period is None else grace_period, settle)
                break
            left = None if deadline is None else deadline.piece()
            if not _wait(running, left) and deadline is not None and deadline.expired:
                return False
        failure = first_failure(self._failures())
        self.close()
        if failure is not None:
            raise _exception(failure)
        return True

    def end(
        self, grace_period: float = FAILURE_GRACE_SECONDS, settle: float = SETTLE_SECONDS
    ) -> None:
        """End the ranks: let them do it for ``settle`` seconds, then SIGTERM, then SIGKILL."""
        deadline = Deadline.after(settle + grace_period + _KILL_SECONDS)
        ending = Ending(lambda: self.running, settle, grace_period, signal.SIGTERM)
        while (running := self.running) and not deadline.expired:
            _wait(running, max(0.0, ending.due - time.monotonic()))
            ending.advance()

    def close(self) -> None:
        """Kill the ranks that still run, and end the store. Idempotent."""
        atexit.unregister(self._at_exit)
        for child in self._children:
            child.close()
        self._node.close()

    def _at_exit(self) -> None:
        """Let ranks that nobody joined end, as multiprocessing does, before their store goes."""
        if not self._daemon:
            for child in self._children:
                child.process.join()
        self.close()

    def _failures(self) -> list[RankExit]:
        return [child.failure for child in self._children if child.failure is not None]


class _Child:
    """One rank, seen from its parent."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        rank: int,
        variables: dict[str, str],
        daemon: bool,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._rank = rank
        self._stopped = False
        self._errors, errors = context.Pipe(duplex=False)
        # The kernel watches the thread that starts a process. Only the main one surely stays.
        lasting = threading.current_thread() is threading.main_thread()
        self.failure: RankExit | None = None
        self.process = context.Process(
            target=_run,
            args=(fn, rank, args, variables, errors, os.getpid() if lasting else None),
            name=f"meshlib-rank-{rank}",
            daemon=daemon,
        )
        try:
            self.process.start()
        except BaseException:
            self._errors.close()
            raise
        finally:
            errors.close()

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when the rank ends or says why it fails."""
        return [self.process.sentinel, *([] if self._errors.closed else [self._errors])]

    def look(self) -> bool:
        """Note what has happened; return whether the process runs."""
        running = self.process.exitcode is None
        error = self._receive()
        code = self.process.exitcode
        if self.failure is None and (error is not None or code):
            self.failure = RankExit(
                rank=self._rank,
                local_rank=self._rank,
                host=socket.gethostname(),
                pid=self.process.pid or 0,
                code=code or 1,
                time=error.time if error is not None else wall_time(),
                stopped=self._stopped and error is None,
                error=error,
            )
        return running

    def has_failed(self) -> bool:
        """Whether it has ended badly, or has said why it is about to."""
        return self.failure is not None

    def signal(self, number: signal.Signals) -> None:
        """Send ``number``: what happens from now on is not the rank's own failure."""
        self._stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def close(self) -> None:
        """Kill the process if it runs, and collect it."""
        if self.process.pid is not None:
            self.process.kill()
            self.process.join()
        self._errors.close()

    def _receive(self) -> ErrorRecord | None:
        if self._errors.closed or not self._errors.poll():
            return None
        try:
            return ErrorRecord.from_dict(self._errors.recv())
        except (EOFError, OSError):
            return None
        finally:
            self._errors.close()


def _wait(children: Sequence[_Child], timeout: float | None) -> bool:
    return bool(wait([item for child in children for item in child.waitables], timeout))


def _exception(failure: RankExit) -> ProcessException:
    rank, pid = failure.rank, failure.pid
    if failure.error is not None:
        text = f"rank {rank} (pid {pid}) raised:\n\n{failure.error.traceback}"
        return ProcessRaisedException(text, rank, pid)
    if failure.code < 0:
        text = f"rank {rank} (pid {pid}) was killed by {failure.exit_name}"
        return ProcessExitedException(text, rank, pid, failure.code, failure.exit_name)
    text = f"rank {rank} (pid {pid}) ended with exit code {failure.code}"
    return ProcessExitedException(text, rank, pid, failure.code, None)


def _run(
    fn: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    variables: dict[str, str],
    errors: Connection,
    parent: int | None,
) -> None:
    """What a rank's process does."""
    if parent is not None:
        die_with_parent(parent)
    else:
        threading.Thread(target=_end_with_parent, name="meshlib-parent", daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    try:
        fn(rank, *args)
    except KeyboardInterrupt:  # the parent was interrupted as well, and says so
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:  # noqa: BLE001 (whatever it is, the parent raises it)
        errors.send(describe_error(error, rank, __file__))
        raise SystemExit(1) from None
    finally:
        errors.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
