"""The parent's view of the processes of ``spawn``."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from meshlib._launcher.nodes.coordinator import Coordinator, OwnLog
from meshlib._launcher.options.launch import FAILURE_GRACE_SECONDS, LaunchOptions, RankProgram
from meshlib._launcher.ranks.failure import ErrorRecord, RankExit, describe_code, first_failure
from meshlib._launcher.ranks.placement import NodePlacement, node_environment
from meshlib._launcher.ranks.workers import RankTermination, RankWorker
from meshlib._launcher.spawned_rank import (
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    run_rank,
)
from transport._waiting.deadline import Deadline

_KILL_SECONDS = 10.0
"""The time that the kernel may take to end a killed process."""


class ProcessContext:
    """The processes of one ``spawn`` and their store. Created by ``spawn``."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, daemon: bool
    ) -> None:
        program = RankProgram("function", getattr(fn, "__qualname__", repr(fn)))
        options = LaunchOptions(program, nprocs)
        name = f"spawn-{os.getpid()}"
        self._job = Coordinator(options, name, OwnLog(options, name))
        self._job.join()
        (placement,) = self._job.poll()
        assert isinstance(placement, NodePlacement)
        environment = node_environment(os.environ, placement, {})
        self._ranks: list[_SpawnedRank] = []
        self._failed: list[_SpawnedRank] = []
        self._daemon = daemon
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for rank in range(nprocs):
                variables = environment | placement.variables_of(rank, rank)
                self._ranks.append(_SpawnedRank(fn, args, rank, variables, daemon))
            undo.pop_all()
        atexit.register(self._at_exit)

    @property
    def processes(self) -> list[SpawnProcess]:
        """The processes, by rank."""
        return [rank.child for rank in self._ranks]

    def pids(self) -> list[int]:
        """Return the process ids, by rank."""
        return [rank.child.pid or 0 for rank in self._ranks]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all ranks have ended; return False after ``timeout`` seconds.

        If a rank fails, ends the others, with ``grace_period`` seconds (default 3) between SIGTERM
        and SIGKILL, and raises the ``ProcessException`` of the first failed rank.
        """
        deadline = None if timeout is None else Deadline.after(timeout)
        while running := self._collect():
            if first := self._first_failure():
                grace = FAILURE_GRACE_SECONDS if grace_period is None else grace_period
                self._end(grace, first)
                break
            left = None if deadline is None else deadline.piece()
            if not _wait(running, left) and deadline is not None and deadline.expired:
                return False
        failure = self._first_failure()
        self.close()
        if failure is not None:
            raise _exception(failure)
        return True

    def end(self) -> None:
        """End the ranks: wait for them to end, then send SIGTERM, then SIGKILL."""
        self._end(FAILURE_GRACE_SECONDS)

    def close(self) -> None:
        """Kill the ranks that still run, and close the store. Idempotent."""
        atexit.unregister(self._at_exit)
        for rank in self._ranks:
            rank.close()
        self._job.close()

    def _end(self, grace: float, failure: RankExit | None = None) -> None:
        ending = RankTermination.after_failure(self._running, grace, failure)
        deadline = Deadline.after(max(0.0, ending.due - time.monotonic()) + grace + _KILL_SECONDS)
        while (running := self._collect()) and not deadline.expired:
            _wait(running, max(0.0, ending.due - time.monotonic()))
            ending.advance()

    def _at_exit(self) -> None:
        """Wait for unjoined ranks, as multiprocessing does, and then close their store."""
        if not self._daemon:
            while running := self._collect():
                _wait(running, None)
        self.close()

    def _collect(self) -> list[_SpawnedRank]:
        """Report failed ranks to the others; return the ranks that have not ended."""
        for rank in self._ranks:
            ended = rank.collect()
            if rank.has_failed():
                if rank not in self._failed:
                    self._failed.append(rank)
                    if not (failure := rank.result()).stopped:
                        self._job.failed(failure)
            elif ended:
                self._job.finished([rank.rank])
        return self._running()

    def _running(self) -> list[_SpawnedRank]:
        return [rank for rank in self._ranks if rank.running]

    def _first_failure(self) -> RankExit | None:
        results = [rank.result() for rank in self._failed]
        return first_failure(result for result in results if not result.ok)


class _SpawnedRank(RankWorker):
    """The parent's view of one rank."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        rank: int,
        variables: dict[str, str],
        daemon: bool,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._errors, errors = context.Pipe(duplex=False)
        self._reported: ErrorRecord | None = None
        # The kernel's parent-death signal follows the starting thread. Only the main thread is sure
        # to stay.
        lasting = threading.current_thread() is threading.main_thread()
        self.child = context.Process(
            target=run_rank,
            args=(fn, rank, args, variables, errors, os.getpid() if lasting else None),
            name=f"meshlib-rank-{rank}",
            daemon=daemon,
        )
        super().__init__(_SpawnedProcess(self.child), rank, rank, self._receive)
        try:
            self.child.start()
        except Exception:
            self._errors.close()
            raise
        finally:
            errors.close()

    @property
    def waitables(self) -> list[Any]:
        """The objects to wait on: one becomes ready when the rank ends or reports its failure."""
        return [self.child.sentinel, *([] if self._errors.closed else [self._errors])]

    def close(self) -> None:
        """Kill the process if it is running, and collect it."""
        if self.child.pid is not None:
            self.child.kill()
            self.child.join()
        self._errors.close()

    def _receive(self) -> ErrorRecord | None:
        if not self._errors.closed and self._errors.poll():
            with contextlib.suppress(EOFError, OSError), self._errors as errors:
                self._reported = ErrorRecord.from_dict(errors.recv())
        return self._reported


class _SpawnedProcess:
    """A multiprocessing process with the part of ``Popen``'s interface that ``RankWorker`` uses."""

    def __init__(self, child: SpawnProcess) -> None:
        self._child = child
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid or 0

    def poll(self) -> int | None:
        """Collect the process if it has ended; return its exit code."""
        self.returncode = self._child.exitcode
        return self.returncode

    def wait(self) -> int | None:
        """Wait for the end of the process; return its exit code."""
        self._child.join()
        return self.poll()


def _wait(ranks: Sequence[_SpawnedRank], timeout: float | None) -> bool:
    return bool(wait([item for rank in ranks for item in rank.waitables], timeout))


def _exception(failure: RankExit) -> ProcessException:
    rank, pid = failure.rank, failure.pid
    if failure.error is not None:
        text = f"rank {rank} (pid {pid}) raised:\n\n{failure.error.traceback}"
        return ProcessRaisedException(text, rank, pid)
    if failure.code < 0:
        text = f"rank {rank} (pid {pid}) was killed by {failure.exit_name}"
        return ProcessExitedException(text, rank, pid, failure.code, describe_code(failure.code))
    text = f"rank {rank} (pid {pid}) ended with exit code {failure.code}"
    return ProcessExitedException(text, rank, pid, failure.code, None)
