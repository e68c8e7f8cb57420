"""Interleaved measurement of cases in several libraries' jobs.

Other load on the machine then affects all libraries.
"""

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
"""A function that gets the current measurement, and the finished share."""


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
    """The cells to measure. Cells with equal numbers of ranks are adjacent.

    ``pythons`` has the interpreter of each library's environment. ``rounds`` is the number of turns
    of each library in each cell, ``turn`` the approximate seconds of a turn. After ``timeout``
    seconds a cell ends, but not before its second round.
    """

    cells: Sequence[Cell]
    pythons: dict[str, str]
    rounds: int
    turn: float = 0.1
    timeout: float = 30.0


def grid(
    cases: Sequence[str], sizes: Sequence[int], ranks: Sequence[int], libraries: Sequence[str]
) -> list[Cell]:
    """Return a cell for each case, size and number of ranks; ``libraries`` begins with meshlib.

    If sizes reach ``MEMORY_BOUND``, a cell that measures the memory itself precedes them.
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
    """Return the cell that measures the copy bandwidth of all ranks together."""
    return Cell(COPY, COPY_BYTES, ranks, (library,))


def _has(library: str, case: str, first: str) -> bool:
    if case == COPY:
        return library == first
    cases = LIBRARIES[library].cases
    return cases is None or case in cases


@dataclass(slots=True)
class CaseResult:
    """The result of one case, size and number of ranks in one library.

    ``rounds`` has the slowest rank's seconds of each call, for each turn.
    """

    case: str
    nbytes: int
    ranks: int
    library: str
    version: str
    rounds: list[list[float]] = field(default_factory=list[list[float]])
    after_last: list[list[float]] = field(default_factory=list[list[float]])
    """The seconds from the last rank's entry to the last rank's exit, like ``rounds``."""

    @property
    def seconds(self) -> list[float]:
        """The seconds of all calls."""
        return [seconds for round_ in self.rounds for seconds in round_]

    @property
    def median(self) -> float:
        """The median of the rounds' medians."""
        return _median(self.rounds)

    @property
    def median_after_last(self) -> float | None:
        """The median of ``after_last``'s medians; None if that was not measured."""
        return _median(self.after_last) if self.after_last else None

    def quantile(self, tenth: int) -> float:
        """Return the decile number ``tenth`` of ``seconds``."""
        return float(np.quantile(self.seconds, tenth / 10))

    @property
    def moved(self) -> float:
        """The least bytes per second that all ranks together must have read and written."""
        return CASES[self.case].moved(self.nbytes, self.ranks) / self.median

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, as nccl-tests count them."""
        return CASES[self.case].traffic(self.nbytes, self.ranks)[0] / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second, comparable between collectives and numbers of ranks."""
        return self.algorithm_bandwidth * CASES[self.case].traffic(self.nbytes, self.ranks)[1]


def _median(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(statistics.median, rounds))


class WrongResultError(BenchmarkError):
    """An error for a wrong result of a library."""


@dataclass(slots=True)
class Contender:
    """A library's job, which is measured alternately with others."""

    job: LibraryJob
    version: str
    seconds_a_call: float = 0.0

    def measure(
        self, case: str, nbytes: int, repetitions: int, warmup: int, keep: bool
    ) -> Repetitions:
        """Measure one turn; raise WrongResultError when the result is wrong."""
        block = self.job.measure(case, nbytes, repetitions, warmup, keep=keep)
        if not block.right:
            raise WrongResultError(
                f"{self.job.library}: {case} of {nbytes} bytes returned a wrong result"
            )
        self.seconds_a_call = block.turn / (repetitions + warmup)
        return block

    def probe(self, case: str, nbytes: int, keep: bool) -> None:
        """Measure the time of a call: the second one, because the first makes connections."""
        for _ in range(2):
            self.measure(case, nbytes, 1, 0, keep)

    def repetitions(self, rounds: int, turn: float) -> tuple[int, int]:
        """Return the numbers of measured and of warm-up calls of the next turn.

        They depend on the time of a call in the last turn.
        """
        if self.seconds_a_call > _SLOW_SECONDS:
            return 1, 0
        fewest = -(-_FEWEST_CALLS // rounds)
        repetitions = max(fewest, min(_MOST_IN_A_TURN, int(turn / self.seconds_a_call)))
        return repetitions, 1 if repetitions < _FEWEST_CALLS else 2


@dataclass(slots=True)
class Skipped:
    """A cell that was not measured, and the reason."""

    cell: Cell
    reason: str

    def __str__(self) -> str:
        return f"{self.cell}: not measured: {self.reason}"


def run(plan: BenchmarkPlan, progress: Progress) -> Iterator[list[CaseResult] | Skipped]:
    """Yield a list of each cell's results, one for each library, or ``Skipped``."""
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
        reason = f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are available"
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
        # A library finds the caches as the one before left them, so the order alternates.
        for contender in reversed(contenders) if backwards else contenders:
            library = contender.job.library
            try:
                if library in results:
                    turn(contender)
            except WrongResultError as error:
                # Report a peer's error, but continue.
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
