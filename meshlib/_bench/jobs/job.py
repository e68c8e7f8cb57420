"""The processes of one library's job, which measure on request."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshlib
from meshlib._bench.libraries import LIBRARIES
from transport._waiting.deadline import Deadline

_START_SECONDS = 120.0
_MEASURE_SECONDS = 300.0
_LEAVE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_TERMINATE_SECONDS = 5.0
_ROOT = Path(meshlib.__file__).parents[1]

# $0 is the folder of the pipes; the other arguments are the program.
_SHELL = 'exec "$@" --rank "$RANK" <"$0/requests.$RANK" >"$0/answers.$RANK"'

# One thread per rank, as launchers set it, and the loopback interface for all.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class BenchmarkError(RuntimeError):
    """A job that could not be started, or failed; the message ends with its output."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """The results of several repetitions of one case."""

    seconds: list[list[float]]
    """The seconds of each rank, for each repetition."""

    after_last: list[float]
    """The seconds from the last rank's entry to the last rank's exit, for each repetition."""

    right: bool
    turn: float
    """The seconds of the whole block."""

    counted: Counter[str]
    """The sums of the ranks' counters since the job's start; empty without counters."""


class LibraryJob:
    """A job of ``size`` ranks of ``library``, run by the interpreter ``python``.

    Made by ``running_job``. Each rank runs ``module`` (or the file of that path), with the protocol
    of ``meshlib._bench.jobs.worker``. ``folder`` gets the job's pipes and output.
    """

    def __init__(
        self,
        library: str,
        python: str,
        size: int,
        folder: Path,
        module: str = "meshlib._bench.jobs.worker",
    ) -> None:
        self.library = library
        self.size = size
        self._lines: list[bytes] = [b""] * size
        runnable = [module] if module.endswith(".py") else ["-m", module]
        program = [python, *runnable, "--library", library, "--size", str(size)]
        variables = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(_ROOT)}
        known = LIBRARIES.get(library)
        launcher, variable = (known.launcher, known.rank_variable) if known else ((), "")
        self.processes: RankProcesses = RankProcesses(
            program, size, folder, variables, launcher, variable
        )
        self._selector = selectors.DefaultSelector()
        for rank, fd in enumerate(self.processes.answers):
            self._selector.register(fd, selectors.EVENT_READ, rank)

    def start(self) -> str:
        """Make the ranks join their job; return the library's version."""
        deadline = Deadline.after(_START_SECONDS)
        port = self._answers(range(1), deadline)[0]
        self._send(range(1, self.size), port)
        answers = self._answers(range(self.size), deadline)
        self.processes.pids = [answer["pid"] for answer in answers if "pid" in answer]
        return answers[0]["ready"]

    def measure(
        self,
        case: str,
        nbytes: int,
        repetitions: int,
        warmup: int,
        *,
        keep: bool = True,
        synchronised: bool = True,
    ) -> Repetitions:
        """Measure one block of repetitions, after ``warmup`` unmeasured ones.

        If ``keep``, the ranks reuse their arrays for the next block of the same case. If
        ``synchronised``, a barrier precedes each repetition.
        """
        began = time.perf_counter()
        answers = self.query(
            {
                "case": case,
                "nbytes": nbytes,
                "repetitions": repetitions,
                "warmup": warmup,
                "keep": keep,
                "synchronised": synchronised,
            }
        )
        seconds = _by_call(answers, "seconds")
        return Repetitions(
            seconds,
            [
                max(map(sum, zip(entries, times, strict=True))) - max(entries)
                for entries, times in zip(_by_call(answers, "entered"), seconds, strict=True)
            ],
            all(answer["right"] for answer in answers),
            time.perf_counter() - began,
            sum((Counter(answer.get("counted")) for answer in answers), Counter[str]()),
        )

    def query(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``request`` to all ranks; return their answers, by rank."""
        self._send(range(self.size), request)
        return self._answers(range(self.size), Deadline.after(_MEASURE_SECONDS))

    def end(self, *, orderly: bool) -> None:
        """Make the ranks leave (or kill them unless ``orderly``), and wait for all."""
        self._selector.close()
        if not orderly:
            self.processes.kill()
        self.processes.hang_up()
        self.processes.end(_LEAVE_SECONDS)

    def _send(self, ranks: Sequence[int], message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for rank in ranks:
            os.write(self.processes.requests[rank], line)

    def _answers(self, ranks: Sequence[int], deadline: Deadline) -> list[dict[str, Any]]:
        """Read one line from each of ``ranks``."""
        while missing := [rank for rank in ranks if b"\n" not in self._lines[rank]]:
            ready = self._selector.select(min(deadline.remaining(), _LOOK_SECONDS))
            if not ready and deadline.expired:
                raise self._failure(f"no answer from ranks {missing} in {deadline.seconds:g} s")
            if not ready and self.processes.has_ended():
                raise self._failure(f"a process has ended; no answer from ranks {missing}")
            for key, _ in ready:
                rank: int = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    raise self._failure(f"rank {rank} has ended")
                self._lines[rank] += data
        return [self._take_line(rank) for rank in ranks]

    def _take_line(self, rank: int) -> dict[str, Any]:
        line, _, self._lines[rank] = self._lines[rank].partition(b"\n")
        return json.loads(line)

    def _failure(self, reason: str) -> BenchmarkError:
        printed = self.processes.log.read_text(errors="replace")[-4000:]
        return BenchmarkError(f"{self.library}, {self.size} ranks: {reason}\n{printed}")


def _by_call(answers: Sequence[dict[str, Any]], name: str) -> list[list[float]]:
    """Return the ranks' values of ``name`` for each call, by rank."""
    return [list(values) for values in zip(*(answer[name] for answer in answers), strict=True)]


@contextlib.contextmanager
def running_job(
    library: str, python: str, size: int, module: str = "meshlib._bench.jobs.worker"
) -> Generator[LibraryJob]:
    """Run a job until the block ends, then remove its processes and files."""
    with tempfile.TemporaryDirectory(prefix="meshlib-bench-") as folder:
        job = LibraryJob(library, python, size, Path(folder), module)
        orderly = False
        try:
            yield job
            orderly = True
        finally:
            job.end(orderly=orderly)


class RankProcesses:
    """The processes of ``size`` ranks that run ``program`` with ``--rank`` appended.

    Each rank has its own pipe in each direction. Ranks under an MPI launcher inherit its input and
    output, so these are named pipes, which a shell opens in each rank. A rank that waits in a read
    of its pipe uses no processor, while one that waits in an MPI barrier does.

    ``launcher`` is the command that starts all ranks, and sets each rank's number in the variable
    ``rank_variable``. If it is empty, each rank is started separately. The ranks' output is written
    to ``folder``.
    """

    def __init__(
        self,
        program: Sequence[str],
        size: int,
        folder: Path,
        environment: Mapping[str, str],
        launcher: Sequence[str],
        rank_variable: str,
    ) -> None:
        self.requests: list[int] = []
        self.answers: list[int] = []
        self.log: Path = folder / "errors.txt"
        self.pids: list[int] = []
        """The process ids of the ranks, if known; a launcher's ranks are not our children."""

        self._launched = bool(launcher)
        self.started: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            requests, answers = folder / f"requests.{rank}", folder / f"answers.{rank}"
            os.mkfifo(requests)
            os.mkfifo(answers)
            # O_RDWR does not wait for the rank; only this descriptor keeps the write end open.
            self.requests.append(os.open(requests, os.O_RDWR | os.O_CLOEXEC))
            self.answers.append(os.open(answers, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        shell = ["/bin/sh", "-c", f"RANK=${rank_variable or 'RANK'}; {_SHELL}", str(folder)]
        if launcher:
            # The matching launcher is in the folder of the interpreter with that MPI.
            binaries = str(Path(program[0]).parent)
            path = binaries + os.pathsep + environment.get("PATH", os.defpath)
            found = shutil.which(launcher[0], path=path) or launcher[0]
            command = [found, *launcher[1:], "-n", str(size), *shell, *program]
            self._start(command, {**environment, "PATH": path})
        else:
            for rank in range(size):
                self._start([*shell, *program], {**environment, "RANK": str(rank)})

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with self.log.open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def has_ended(self) -> bool:
        """Return whether one of the started processes has ended."""
        return any(process.poll() is not None for process in self.started)

    def hang_up(self) -> None:
        """Close the ranks' input, which makes them leave."""
        for fd in (*self.requests, *self.answers):
            os.close(fd)
        self.requests, self.answers = [], []

    def end(self, seconds: float) -> None:
        """Wait at most ``seconds`` for all processes to leave, then kill them."""
        deadline = Deadline.after(seconds)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(deadline.remaining())
        self.kill()

    def kill(self) -> None:
        """Kill all processes, including ranks that are a launcher's children."""
        alive = [process for process in self.started if process.poll() is None]
        if not alive:
            return
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        deadline = Deadline.after(_TERMINATE_SECONDS)
        for process in alive:
            if self._launched:  # on SIGTERM a launcher also ends its helpers and removes its files
                process.terminate()
            else:
                process.kill()
        for process in alive:
            try:
                process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
