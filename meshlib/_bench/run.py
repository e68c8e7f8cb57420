"""Measures cases in several libraries' jobs, interleaved, so that all meet the same weather."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from meshlib._bench.cases import CASES, COPY
from meshlib._bench.jobs.job import BenchmarkError, LibraryJob, Repetitions, running_job
from meshlib._bench.libraries import LIBRARIES, OWN
from meshlib._bench.sizes import format_size
from transport._net.limits import memory_left
from transport._waiting.deadline import Deadline

MEMORY_BOUND = 1 << 20
COPY_BYTES = 64 << 20

_SLOW_SECONDS = 0.25
_FEWEST_CALLS, _FEWEST_ROUNDS = 8, 2
_MOST_IN_A_TURN = 50
_KEPT_SHARE, _LARGEST_SHARE = 0.25, 0.6

Progress = Callable[[str, float], None]
"""Called with the current measurement, and the share that is done."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One case at one size among ``ranks`` ranks, in each of ``libraries``."""

    case: str
    nbytes: int
    ranks: int
    libraries: tuple[str, ...]

    def __str__(self) -> str:
        size = f" {format_size(self.nbytes)}" if self.nbytes else ""
        return f"{self.case}{size}, {self.ranks} ranks"


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """The cells to measure. Cells with the same number of ranks are adjacent.

    ``pythons`` gives for each library the interpreter of its environment; ``rounds`` is how often
    each library gets its turn in each cell, ``turn`` about how many seconds a turn is. A cell that
    has taken ``timeout`` seconds has no more rounds once it has had two.
    """

    cells: Sequence[Cell]
    pythons: dict[str, str]
    rounds: int
    turn: float = 0.1
    timeout: float = 30.0


def grid(
    cases: Sequence[str], sizes: Sequence[int], ranks: Sequence[int], libraries: Sequence[str]
) -> list[Cell]:
    """Return a cell for each case, size and number of ranks; our own library comes first.

    Where memory is moved in earnest, a cell that measures the memory itself goes ahead.
    """
    cells: list[Cell] = []
    for count in ranks:
        if max(sizes) >= MEMORY_BOUND and COPY not in cases:
            cells.append(copy_cell(count, libraries[0]))
        for case in cases:
            able = tuple(name for name in libraries if _has(name, case, libraries[0]))
            for nbytes in sizes if CASES[case].is_sized else [0]:
                cells.append(Cell(case, nbytes, count, able))
    return cells


def copy_cell(ranks: int, library: str) -> Cell:
    """Return the cell that measures how fast all ranks copy at once."""
    return Cell(COPY, COPY_BYTES, ranks, (library,))


def _has(library: str, case: str, first: str) -> bool:
    if case == COPY:
        return library == first
    cases = LIBRARIES[library].cases
    return cases is None or case in cases


@dataclass(slots=True)
class CaseResult:
    """One case, size and number of ranks in one library.

    ``rounds`` holds for each of its turns the seconds of each call: those of the slowest rank.
    """

    case: str
    nbytes: int
    ranks: int
    library: str
    version: str
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    after_last: list[list[float]] = field(default_factory=list[list[float]])
    """The same, from when the last rank entered to when the last one left."""

    @property
    def seconds(self) -> list[float]:
        """Those of all calls."""
        return [seconds for round_ in self.rounds for seconds in round_]

    @property
    def median(self) -> float:
        """The median of the rounds' medians."""
        return _median(self.rounds)

    @property
    def median_after_last(self) -> float | None:
        """The same of ``after_last``; None if that was not measured."""
        return _median(self.after_last) if self.after_last else None

    def quantile(self, tenth: int) -> float:
        """Return the ``tenth`` tenth's upper bound of ``seconds``."""
        return float(np.quantile(self.seconds, tenth / 10))

    @property
    def moved(self) -> float:
        """Bytes a second that the ranks must have read and written, all of them together."""
        return CASES[self.case].moved(self.nbytes, self.ranks) / self.median

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second, as nccl-tests count them."""
        return CASES[self.case].traffic(self.nbytes, self.ranks)[0] / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second, comparable over collectives and numbers of ranks."""
        return self.algorithm_bandwidth * CASES[self.case].traffic(self.nbytes, self.ranks)[1]


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(statistics.median, rounds))


class WrongResultError(BenchmarkError):
    """A library's result was wrong."""


@dataclass(slots=True)
class Contender:
    """A job that takes turns with others."""

    job: LibraryJob
    version: str
    seconds_a_call: float = 0.0

    def measure(
        self, case: str, nbytes: int, repetitions: int, warmup: int, keep: bool
    ) -> Repetitions:
        """Take a turn; raise WrongResultError when the result is wrong."""
        block = self.job.measure(case, nbytes, repetitions, warmup, keep=keep)
        if not block.right:
            raise WrongResultError(
                f"{self.job.library}: {case} of {nbytes} bytes gave a wrong result"
            )
        self.seconds_a_call = block.turn / (repetitions + warmup)
        return block

    def probe(self, case: str, nbytes: int, keep: bool) -> None:
        """Find out how long a call takes: by the second one, since the first makes connections."""
        for _ in range(2):
            self.measure(case, nbytes, 1, 0, keep)

    def repetitions(self, rounds: int, turn: float) -> tuple[int, int]:
        """Return how many calls the next turn has, by what the last one took, and how many before
        them that do not count.
        """
        if self.seconds_a_call > _SLOW_SECONDS:
            return 1, 0
        fewest = -(-_FEWEST_CALLS // rounds)
        repetitions = max(fewest, min(_MOST_IN_A_TURN, int(turn / self.seconds_a_call)))
        return repetitions, 1 if repetitions < _FEWEST_CALLS else 2


@dataclass(slots=True)
class Skipped:
    """A cell that was not measured, and why."""

    cell: Cell
    reason: str

    def __str__(self) -> str:
        return f"{self.cell}: not measured: {self.reason}"


def run(plan: BenchmarkPlan, progress: Progress) -> Iterator[list[CaseResult] | Skipped]:
    """Yield the results of each cell, a list with one for each library."""
    done = 0
    for size, group in itertools.groupby(plan.cells, lambda cell: cell.ranks):
        cells = list(group)
        with ExitStack() as stack:
            contenders: dict[str, Contender] = {}
            for library, python in plan.pythons.items():
                if any(library in cell.libraries for cell in cells):
                    progress(f"starting {size} ranks of {library}", done / len(plan.cells))
                    job = stack.enter_context(running_job(library, python, size))
                    contenders[library] = Contender(job, job.start())
            for cell in cells:
                progress(str(cell), done / len(plan.cells))
                yield from _measure(plan, cell, [contenders[name] for name in cell.libraries])
                done += 1


def _measure(
    plan: BenchmarkPlan, cell: Cell, contenders: Sequence[Contender]
) -> Iterator[list[CaseResult] | Skipped]:
    case, nbytes, rounds = cell.case, cell.nbytes, plan.rounds
    needed, available = CASES[case].memory(nbytes, cell.ranks), memory_left()[0]
    if needed > _LARGEST_SHARE * available:
        reason = f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are there"
        yield Skipped(cell, reason)
        return
    keep = needed * len(contenders) <= _KEPT_SHARE * available
    results = {
        it.job.library: CaseResult(case, nbytes, cell.ranks, it.job.library, it.version)
        for it in contenders
    }

    def probe(contender: Contender) -> None:
        contender.probe(case, nbytes, keep)

    def measure(contender: Contender) -> None:
        repetitions, warmup = contender.repetitions(rounds, plan.turn)
        block = contender.measure(case, nbytes, repetitions, warmup, keep)
        result = results[contender.job.library]
        result.rounds.append([max(times) for times in block.seconds])
        result.after_last.append(block.after_last)

    def take_turns(turn: Callable[[Contender], None], backwards: bool) -> Iterator[Skipped]:
        # The second library finds the caches as the first left them, so the order alternates.
        for contender in reversed(contenders) if backwards else contenders:
            library = contender.job.library
            try:
                if library in results:
                    turn(contender)
            except WrongResultError as error:
                # A peer's error is to be told, but no reason to end.
                if library in OWN:
                    raise
                del results[library]
                yield Skipped(cell, str(error))

    yield from take_turns(probe, backwards=False)
    deadline = Deadline.after(plan.timeout)
    for round_ in range(rounds):
        if round_ >= _FEWEST_ROUNDS and deadline.expired:
            break
        yield from take_turns(measure, backwards=round_ % 2 == 1)
    yield list(results.values())
