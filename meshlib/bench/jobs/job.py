"""The processes of one library's job, which measure when they are told to and wait otherwise."""

from __future__ import annotations

import json
import os
import selectors
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshlib
from meshlib.bench.jobs.rank_processes import RankProcesses
from meshlib.bench.libraries import LIBRARIES
from transport.deadline import Deadline

_START_SECONDS = 120.0
_MEASURE_SECONDS = 300.0
_LEAVE_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_ROOT = Path(meshlib.__file__).parents[1]

# One thread a rank, as launchers set it, and the loopback for all.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class BenchmarkError(RuntimeError):
    """A job that could not be started, or failed; the message ends with what it printed."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some repetitions of one case: for each, the seconds that each rank took (by rank)."""

    seconds: list[list[float]]
    after_last: list[float]
    """For each, the seconds from when the last rank entered to when the last one left."""

    right: bool
    turn: float
    """Seconds that the block took in all."""

    counted: Counter[str]
    """What the ranks have counted since they began, all together, where they count."""


class Job:
    """``size`` ranks of ``library``, run by the interpreter ``python``. Made by ``running_job``.

    Each runs ``module`` (or the file of that path), which speaks as ``meshlib.bench.jobs.worker``
    does. ``folder`` is for its pipes and what it prints.
    """

    def __init__(
        self,
        library: str,
        python: str,
        size: int,
        folder: Path,
        module: str = "meshlib.bench.jobs.worker",
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
        """Have the ranks find each other; return the library's version."""
        deadline = Deadline.after(_START_SECONDS)
        port = self._answers(range(1), deadline)[0]
        self._tell(range(1, self.size), port)
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
    ) -> Block:
        """Run one block of repetitions, after ``warmup`` that are not counted.

        The ranks keep their arrays for the next block of the same case if ``keep``. A barrier
        comes before each repetition if ``synchronised``.
        """
        began = time.perf_counter()
        answers = self.ask(
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
        return Block(
            seconds,
            [
                max(map(sum, zip(entries, times, strict=True))) - max(entries)
                for entries, times in zip(_by_call(answers, "entered"), seconds, strict=True)
            ],
            all(answer["right"] for answer in answers),
            time.perf_counter() - began,
            sum((Counter(answer.get("counted")) for answer in answers), Counter[str]()),
        )

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``request`` to all ranks; return their answers, by rank."""
        self._tell(range(self.size), request)
        return self._answers(range(self.size), Deadline.after(_MEASURE_SECONDS))

    def end(self, *, orderly: bool) -> None:
        """Let the ranks leave, or kill them; wait for all."""
        self._selector.close()
        if not orderly:
            self.processes.kill()
        self.processes.hang_up()
        self.processes.end(_LEAVE_SECONDS)

    def _tell(self, ranks: Sequence[int], message: dict[str, Any]) -> None:
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
    """Return for each call what the ranks say of it, by rank."""
    return [list(values) for values in zip(*(answer[name] for answer in answers), strict=True)]


@contextmanager
def running_job(
    library: str, python: str, size: int, module: str = "meshlib.bench.jobs.worker"
) -> Generator[Job]:
    """Give a job that runs until the block ends; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="meshlib-bench-") as folder:
        job = Job(library, python, size, Path(folder), module)
        orderly = False
        try:
            yield job
            orderly = True
        finally:
            job.end(orderly=orderly)
