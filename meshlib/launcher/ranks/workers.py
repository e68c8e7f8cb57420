"""The processes of one node's ranks in one attempt."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path

from meshlib.launcher.nodes.coordinator import Placement
from meshlib.launcher.options.launch import LaunchOptions, Program
from meshlib.launcher.ranks import bootstrap
from meshlib.launcher.ranks.failure import ErrorRecord, RankExit, wall_time
from meshlib.launcher.ranks.fork_server import ForkedRank, ForkServer
from meshlib.launcher.ranks.output import OutputPump, RankStreams, connect
from transport import environment

_A_MOMENT = 1.0


class Worker:
    """One rank's process. It leads a session of its own, so that a signal reaches all of it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedRank,
        rank: int,
        local_rank: int,
        error_file: Path,
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.process = process
        self._error_file = error_file
        self._stopped_at: float | None = None
        self._ended_at = 0.0
        self._oom_kills = oom_kills()
        self._hint = ""

    @property
    def running(self) -> bool:
        """Whether the process has not been collected yet."""
        return self.process.returncode is None

    def collect(self) -> bool:
        """Collect the process if it has just ended; return whether it has."""
        if not self.running or self.process.poll() is None:
            return False
        self._ended_at = wall_time()
        killed = self.process.returncode == -signal.SIGKILL and self._stopped_at is None
        if killed and oom_kills() > self._oom_kills:
            self._hint = HINT
        return True

    def has_failed(self) -> bool:
        """Whether the rank has ended badly, or is about to: it has written its error file."""
        return self.process.returncode not in (None, 0) or self._error_file.exists()

    def signal(self, number: signal.Signals, *, stop: bool = True) -> None:
        """Send ``number`` to the rank and the processes of its group; ``stop``: to end it."""
        if not self.running:
            return
        if stop and self._stopped_at is None:
            self._stopped_at = wall_time()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Until the child has called setsid there is no such group, and only the child.
            os.killpg(self.process.pid, number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def told_by_others(self) -> None:
        """Note that the rank has been told to end, a moment ago and not by this launcher."""
        code = self.process.returncode
        if code is None or code < 0:
            self._stopped_at = self._stopped_at or wall_time() - _A_MOMENT

    def result(self) -> RankExit:
        """Return how the rank ended, or, while it runs, how it has failed."""
        error = ErrorRecord.load(self._error_file)
        at = error.time if error and error.time else self._ended_at
        stopped = self._stopped_at is not None and (at == 0.0 or at >= self._stopped_at)
        code = self.process.returncode
        if code is None or (error and self._stopped_at is not None and not stopped):
            # It failed, but has not ended, or only when it was made to: as Python would have ended.
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


class WorkerGroup:
    """All ranks of this node in one attempt."""

    def __init__(
        self,
        options: LaunchOptions,
        placement: Placement,
        run_id: str,
        directory: Path,
        server: ForkServer | None = None,
    ) -> None:
        self.workers: list[Worker] = []
        self._options, self._placement = options, placement
        self._directory, self._server = directory, server
        self._pump = OutputPump()
        self._base = common_environment(os.environ, options, placement, run_id)
        try:
            for local_rank in range(placement.ranks):
                self._begin(placement.first_rank + local_rank, local_rank)
        except BaseException:
            self.signal(signal.SIGKILL)
            for worker in self.workers:
                worker.process.wait()
            self.close(0.0)
            raise
        self._pump.start()

    def add(self, rank: int, local_rank: int) -> Worker:
        """Start one more rank, which comes to the others."""
        return self._begin(rank, local_rank)

    def _begin(self, rank: int, local_rank: int) -> Worker:
        options, placement = self._options, self._placement
        own = self._directory / str(rank)
        own.mkdir(parents=True)
        with contextlib.closing(
            connect(options.output, self._pump, rank, local_rank, placement.ranks, own)
        ) as ends:
            error_file = own / "error.json"
            variables = self._base | placement.variables_of(local_rank)
            variables |= {environment.RANK: str(rank), environment.ERROR_FILE: str(error_file)}
            if rank >= placement.world_size:
                variables[environment.JOIN] = "1"
            process = _start(options.program, ends, variables, self._server)
        worker = Worker(process, rank, local_rank, error_file)
        self.workers.append(worker)
        return worker

    @property
    def running(self) -> list[Worker]:
        """The ranks that have not ended."""
        return [worker for worker in self.workers if worker.running]

    def collect(self) -> list[Worker]:
        """Collect every process that has ended; return the ranks among them.

        Adopted orphans are collected as well, so that a long job does not gather zombies.
        """
        by_pid = {worker.process.pid: worker for worker in self.running}
        ended: list[Worker] = []
        for pid in _ended_children():
            worker = by_pid.get(pid)
            if worker is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            elif worker.collect():
                ended.append(worker)
        return ended

    def signal(self, number: signal.Signals, *, stop: bool = True) -> None:
        """Send ``number`` to every rank that runs; ``stop``: to end it."""
        for worker in self.running:
            worker.signal(number, stop=stop)

    def results(self) -> list[RankExit]:
        """Return how each rank ended."""
        return [worker.result() for worker in self.workers]

    def close(self, timeout: float) -> None:
        """Show what the ranks have written, waiting at most ``timeout`` seconds for its end."""
        self._pump.close(timeout)


@contextlib.contextmanager
def _interrupt_later() -> Generator[None]:
    """Have a process that is started in the block find SIGINT blocked: ``bootstrap`` lets it in.

    Python would print where in its own beginning Ctrl-C came, and in each rank.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended_children() -> Iterator[int]:
    """Yield the process id of each child that has ended, leaving it to be collected."""
    while True:
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if child is None:
            return
        yield child.si_pid


def start_server(options: LaunchOptions, run_id: str) -> ForkServer | None:
    """Start what this node's ranks are forked from, if they are to be."""
    if options.start != "fork" or options.program.kind == "program":
        return None
    variables = {**os.environ, environment.RUN_ID: run_id}
    _limit_threads(variables, options.ranks)
    try:
        with _interrupt_later():
            return ForkServer(partial(_command_line, options.program), variables)
    except OSError:  # out of processes or descriptors: each rank will tell better
        return None


def _start(
    program: Program, ends: RankStreams, variables: Mapping[str, str], server: ForkServer | None
) -> subprocess.Popen[bytes] | ForkedRank:
    flags = "-" if ends.inherited else "-l"
    if not ends.logged:  # a log keeps each rank's traceback; the console gets only the first
        flags += "q"
    if server is not None:
        forked = server.fork(flags, variables, ends.stdout, ends.stderr)
        if forked is not None:
            return forked
    with _interrupt_later():
        return subprocess.Popen(
            _command_line(program, flags),
            env=variables,
            stdout=ends.stdout,
            stderr=ends.stderr,
            start_new_session=True,
        )


def _command_line(program: Program, flags: str) -> list[str]:
    """Return what starts ``program`` in a rank: this Python, and in it ``bootstrap``."""
    python = [sys.executable]
    if program.kind == "program":
        python += ["-I", "-S"]
    return [
        *python,
        bootstrap.__file__,
        str(os.getpid()),
        flags,
        program.kind,
        program.target,
        *program.arguments,
    ]


def _limit_threads(variables: dict[str, str], ranks: int) -> None:
    if ranks > 1:
        # Ranks that each start a thread for every core are slower than ranks with one.
        variables.setdefault("OMP_NUM_THREADS", "1")


def common_environment(
    inherited: Mapping[str, str], options: LaunchOptions, placement: Placement, run_id: str
) -> dict[str, str]:
    """Return the variables that all ranks of this node get."""
    variables = placement.variables(inherited)
    optional = {
        environment.MESH: options.mesh,
        environment.TRACE_DIR: options.trace_dir and str(options.trace_dir.absolute()),
        environment.HOST: options.nodes.local_address,
    }
    variables.update({name: value for name, value in optional.items() if value is not None})
    _limit_threads(variables, placement.ranks)
    return variables | {environment.RUN_ID: run_id}


_CGROUPS = Path("/sys/fs/cgroup")
HINT = "probably the kernel's out-of-memory killer, which has just struck"


def oom_kills() -> int:
    """Return how many processes it has killed in this process's memory cgroup, or, where that does
    not say, on this machine; 0 where nothing does.

    Only that the number rises means anything.
    """
    for path in _counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _counters() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            # In a container the path may begin above what is mounted here: then it is the root.
            for inside in (place.lstrip("/"), ""):
                if not controllers:
                    yield _CGROUPS / inside / "memory.events"
                elif "memory" in controllers.split(","):
                    yield _CGROUPS / "memory" / inside / "memory.oom_control"
    yield Path("/proc/vmstat")
