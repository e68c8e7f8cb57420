"""Starts, watches and ends the processes of one node's ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from meshlib._launcher.options.launch import LaunchOptions
from meshlib._launcher.options.numa import list_cpus
from meshlib._launcher.ranks.failure import OOM_HINT, ErrorRecord, RankExit, oom_kills, wall_time
from meshlib._launcher.ranks.output import OutputPump, connect
from meshlib._launcher.ranks.placement import NodePlacement, limit_threads, node_environment
from meshlib._launcher.ranks.starting import ForkServer, start
from transport import _environment as environment
from transport._platform import ended_child

SETTLE_SECONDS = 0.8
"""The time that the other ranks have to notice a failure and end by themselves."""
SETTLE_AFTER_ECHO_SECONDS = 1.0
"""The same time if the first failure is an echo, whose cause has not been reported yet."""
_A_MOMENT = 1.0


class RankProcess(Protocol):
    """The part of ``subprocess.Popen`` that a ``RankWorker`` uses."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """The exit code, -n for signal n, after the process was collected."""
        ...

    def poll(self) -> int | None:
        """Collect the process if it has ended; return its exit code."""
        ...

    def wait(self) -> int | None:
        """Wait for the end of the process; return its exit code."""
        ...


class RankWorker:
    """One rank's process; ``error`` returns the error that it reported, if any.

    If the process leads a session, signals reach its whole process group.
    """

    def __init__(
        self,
        process: RankProcess,
        rank: int,
        local_rank: int,
        error: Callable[[], ErrorRecord | None],
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.process = process
        self._error = error
        self._stopped_at: float | None = None
        self._ended_at = 0.0
        self._oom_kills = oom_kills()
        self._hint = ""

    @property
    def running(self) -> bool:
        """True if the process has not been collected yet."""
        return self.process.returncode is None

    def collect(self) -> bool:
        """Collect the process if it has just ended; return whether it has."""
        if not self.running or self.process.poll() is None:
            return False
        self._ended_at = wall_time()
        killed = self.process.returncode == -signal.SIGKILL and self._stopped_at is None
        if killed and oom_kills() > self._oom_kills:
            self._hint = OOM_HINT
        return True

    def has_failed(self) -> bool:
        """True if the rank has failed, or has reported an error before its end."""
        return self.process.returncode not in (None, 0) or self._error() is not None

    def signal(self, number: signal.Signals, *, stop: bool = True) -> None:
        """Send ``number`` to the rank's process group. ``stop``: the signal is meant to end it."""
        if not self.running:
            return
        if stop and self._stopped_at is None:
            self._stopped_at = wall_time()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Before the child has called setsid, the group does not exist.
            os.killpg(self.process.pid, number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def note_external_signal(self) -> None:
        """Record that another process has just sent the rank a signal to end."""
        code = self.process.returncode
        if code is None or code < 0:
            self._stopped_at = self._stopped_at or wall_time() - _A_MOMENT

    def result(self) -> RankExit:
        """Return the rank's exit, or its failure while it still runs."""
        error = self._error()
        at = error.time if error and error.time else self._ended_at
        stopped = self._stopped_at is not None and (at == 0.0 or at >= self._stopped_at)
        code = self.process.returncode
        if code is None or (error and self._stopped_at is not None and not stopped):
            # It failed but has not ended by itself: use the exit code that Python would have used.
            interrupted = error is not None and error.type == KeyboardInterrupt.__name__
            code = -signal.SIGINT if interrupted else 1
        return RankExit(
            rank=self.rank,
            local_rank=self.local_rank,
            host=socket.gethostname(),
            pid=self.process.pid,
            code=code,
            time=at,
            stopped=stopped,
            error=error,
            hint=self._hint if code == -signal.SIGKILL else "",
        )


class RankTermination:
    """Sends ``first`` after ``settle`` seconds and SIGKILL ``grace`` seconds later.

    ``running`` returns the ranks that have not ended. If ``first`` is None, another process has
    sent the first signal. A rank that has already reported its failure gets only SIGKILL, because
    it may be saving its state. Call ``advance`` whenever ``due`` has passed.
    """

    def __init__(
        self,
        running: Callable[[], Sequence[RankWorker]],
        settle: float,
        grace: float,
        first: signal.Signals | None,
    ) -> None:
        self.running = running
        self._first = first
        self._grace = grace
        self.due: float = time.monotonic() + (settle if first is not None else grace)
        self.advance()

    @classmethod
    def after_failure(
        cls,
        running: Callable[[], Sequence[RankWorker]],
        grace: float,
        failure: RankExit | None = None,
    ) -> RankTermination:
        """Return an ending because of a ``failure`` on this node, or (None) elsewhere."""
        echo = failure is not None and not failure.is_cause
        settle = SETTLE_AFTER_ECHO_SECONDS if echo else SETTLE_SECONDS
        return cls(running, settle, grace, signal.SIGTERM)

    def on_cause(self) -> None:
        """Send the first signal sooner, because the original failure is known."""
        if self._first is not None:
            self.due = min(self.due, time.monotonic() + SETTLE_SECONDS)

    def kill(self) -> None:
        """Send SIGKILL now."""
        self._first = None
        self.due = time.monotonic()
        self.advance()

    def advance(self) -> None:
        """Send the signals that are due."""
        now = time.monotonic()
        if now < self.due:
            return
        if self._first is None:
            for rank in self.running():
                rank.signal(signal.SIGKILL)
            self.due = now + 1.0
            return
        for rank in self.running():
            if not rank.has_failed():
                rank.signal(self._first)
        self._first = None
        self.due = now + self._grace


class WorkerGroup:
    """All ranks of this node in one attempt."""

    def __init__(
        self,
        options: LaunchOptions,
        placement: NodePlacement,
        run_id: str,
        directory: Path,
        server: ForkServer | None,
    ) -> None:
        self.workers: list[RankWorker] = []
        self._options, self._placement = options, placement
        self._directory, self._server = directory, server
        self._pump = OutputPump()
        self._base = node_environment(os.environ, placement, _of_launch(options, run_id))
        limit_threads(self._base, placement.ranks)
        try:
            for local_rank in range(placement.ranks):
                self.add(placement.first_rank + local_rank, local_rank)
        except Exception:
            self.signal(signal.SIGKILL)
            for worker in self.workers:
                worker.process.wait()
            self.close(0.0)
            raise

    def add(self, rank: int, local_rank: int) -> None:
        """Start one more rank."""
        options, placement = self._options, self._placement
        own = self._directory / str(rank)
        own.mkdir(parents=True)
        with contextlib.closing(
            connect(options.output, self._pump, rank, local_rank, placement.ranks, own)
        ) as ends:
            error_file = own / "error.json"
            variables = self._base | placement.variables_of(rank, local_rank)
            variables[environment.ERROR_FILE] = str(error_file)
            if options.cpus:  # later ranks use the CPUs of lost ones
                node = options.cpus[local_rank % len(options.cpus)]
                variables[environment.CPUS] = list_cpus(node.cpus)
            process = start(options.program, ends, variables, self._server)
        worker = RankWorker(process, rank, local_rank, partial(ErrorRecord.load, error_file))
        self.workers.append(worker)

    @property
    def running(self) -> list[RankWorker]:
        """The ranks that have not ended."""
        return [worker for worker in self.workers if worker.running]

    def collect(self) -> list[RankWorker]:
        """Collect every process that has ended; return the ranks among them.

        Adopted orphans are also collected, so that zombies do not accumulate.
        """
        by_pid = {worker.process.pid: worker for worker in self.running}
        ended: list[RankWorker] = []
        while (pid := ended_child(list(by_pid))) is not None:
            worker = by_pid.pop(pid, None)
            if worker is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            elif worker.collect():
                ended.append(worker)
        return ended

    def signal(self, number: signal.Signals, *, stop: bool = True) -> None:
        """Send ``number`` to every running rank. ``stop``: the signal is meant to end it."""
        for worker in self.running:
            worker.signal(number, stop=stop)

    def results(self) -> list[RankExit]:
        """Return the exits of all ranks."""
        return [worker.result() for worker in self.workers]

    def close(self, timeout: float) -> OSError | None:
        """Write the ranks' remaining output, for up to ``timeout`` seconds.

        Returns the error if some output could not be written.
        """
        self._pump.close(timeout)
        return self._pump.unwritten


def _of_launch(options: LaunchOptions, run_id: str) -> dict[str, str | None]:
    return {
        environment.MESH: options.mesh,
        environment.TRACE_DIR: str(options.trace_dir.absolute()) if options.trace_dir else None,
        environment.HOST: options.nodes.local_address,
        environment.RUN_ID: run_id,
    }
