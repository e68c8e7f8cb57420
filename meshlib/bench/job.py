"""The processes of one library's job, which measure when they are told to and wait otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshlib
from transport.deadline import Deadline

_START_SECONDS = 120.0
_MEASURE_SECONDS = 300.0
_LEAVE_SECONDS = 10.0
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
    right: bool


class Job:
    """``size`` ranks of ``library``, run by the interpreter ``python``. Made by ``running_job``.

    Each runs ``module``, which speaks as ``meshlib.bench.worker`` does.
    """

    def __init__(
        self,
        library: str,
        python: str,
        size: int,
        log: Path,
        module: str = "meshlib.bench.worker",
    ) -> None:
        self.library = library
        self.size = size
        self._log = log
        self._selector = selectors.DefaultSelector()
        self._lines: list[bytes] = [b""] * size
        self._workers: list[subprocess.Popen[bytes]] = []
        variables = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(_ROOT)}
        for rank in range(size):
            command = [python, "-m", module]
            command += ["--library", library, "--rank", str(rank), "--size", str(size)]
            with log.open("ab") as errors:
                worker = subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            self._workers.append(worker)
            assert worker.stdout is not None
            os.set_blocking(worker.stdout.fileno(), False)
            self._selector.register(worker.stdout, selectors.EVENT_READ, rank)

    def start(self) -> str:
        """Have the ranks find each other; return the library's version."""
        deadline = Deadline.after(_START_SECONDS)
        port = self._answers(range(1), deadline)[0]
        self._tell(range(1, self.size), port)
        return self._answers(range(self.size), deadline)[0]["ready"]

    def measure(self, case: str, nbytes: int, repetitions: int, warmup: int) -> Block:
        """Run one block of repetitions, after ``warmup`` that are not counted."""
        answers = self.ask(
            {"case": case, "bytes": nbytes, "repetitions": repetitions, "warmup": warmup}
        )
        by_rank = [answer["seconds"] for answer in answers]
        return Block([list(times) for times in zip(*by_rank, strict=True)], answers[0]["right"])

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send ``request`` to all ranks; return their answers, by rank."""
        self._tell(range(self.size), request)
        return self._answers(range(self.size), Deadline.after(_MEASURE_SECONDS))

    def end(self, *, orderly: bool) -> None:
        """Let the ranks leave, or kill them; wait for all."""
        self._selector.close()
        for worker in self._workers:
            assert worker.stdin is not None
            if not orderly:
                worker.kill()
            with contextlib.suppress(OSError):
                worker.stdin.close()
        deadline = Deadline.after(_LEAVE_SECONDS)
        for worker in self._workers:
            try:
                worker.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            assert worker.stdout is not None
            worker.stdout.close()

    def _tell(self, ranks: Sequence[int], message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for rank in ranks:
            stdin = self._workers[rank].stdin
            assert stdin is not None
            try:
                stdin.write(line)
                stdin.flush()
            except OSError as error:
                raise self._failure(f"rank {rank} has ended") from error

    def _answers(self, ranks: Sequence[int], deadline: Deadline) -> list[dict[str, Any]]:
        """Read one line from each of ``ranks``."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(ranks):
            ready = self._selector.select(deadline.remaining())
            if not ready and deadline.expired:
                missing = sorted(set(ranks) - set(found))
                raise self._failure(f"no answer from ranks {missing} in {deadline.seconds:g} s")
            for key, _ in ready:
                rank: int = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    raise self._failure(f"rank {rank} has ended")
                self._lines[rank] += data
                line, newline, rest = self._lines[rank].partition(b"\n")
                if newline:
                    self._lines[rank] = rest
                    found[rank] = json.loads(line)
        return [found[rank] for rank in ranks]

    def _failure(self, reason: str) -> BenchmarkError:
        printed = self._log.read_text(errors="replace")[-4000:]
        return BenchmarkError(f"{self.library}, {self.size} ranks: {reason}\n{printed}")


@contextmanager
def running_job(
    library: str, python: str, size: int, module: str = "meshlib.bench.worker"
) -> Generator[Job]:
    """Give a job that runs until the block ends; nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="meshlib-bench-") as folder:
        job = Job(library, python, size, Path(folder) / "errors.txt", module)
        orderly = False
        try:
            yield job
            orderly = True
        finally:
            job.end(orderly=orderly)
