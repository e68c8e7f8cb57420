"""Measures cases in several libraries' jobs, interleaved, so that all meet the same weather."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from meshlib.bench.cases import CASES
from meshlib.bench.job import BenchmarkError, Job, running_job
from meshlib.bench.libraries import LIBRARIES
from meshlib.bench.sizes import format_size

_TURN_SECONDS = 0.1
_FEWEST_CALLS = 8
_MOST_IN_A_TURN = 50
_KEPT_SHARE, _LARGEST_SHARE = 0.25, 0.6

Progress = Callable[[str, float], None]
"""Told what is being done, and the share that is done."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure: every case at every size, with each number of ranks.

    ``pythons`` gives for each library the interpreter of its environment; ``rounds`` is how often
    each library gets its turn for each case and size.
    """

    cases: Sequence[str]
    sizes: Sequence[int]
    ranks: Sequence[int]
    pythons: dict[str, str]
    rounds: int

    def cells(self) -> list[tuple[str, int]]:
        """Return each case with each of its sizes."""
        return [
            (case, nbytes)
            for case in self.cases
            for nbytes in (self.sizes if CASES[case].is_sized else [0])
        ]


@dataclass(slots=True)
class Result:
    """One case, size and number of ranks in one library.

    ``rounds`` holds for each of its turns the seconds of each call: those of the slowest rank.
    """

    case: str
    nbytes: int
    ranks: int
    library: str
    version: str
    rounds: list[list[float]] = field(default_factory=list[list[float]])

    @property
    def seconds(self) -> list[float]:
        """Those of all calls."""
        return [seconds for round_ in self.rounds for seconds in round_]

    @property
    def median(self) -> float:
        """The median of the rounds' medians."""
        return statistics.median(map(statistics.median, self.rounds))

    def quantile(self, tenth: int) -> float:
        """Return the ``tenth`` tenth's upper bound of ``seconds``."""
        return statistics.quantiles(self.seconds, n=10, method="inclusive")[tenth - 1]

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second, as nccl-tests count them."""
        return CASES[self.case].traffic(self.nbytes, self.ranks)[0] / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second, comparable over collectives and numbers of ranks."""
        return self.algorithm_bandwidth * CASES[self.case].traffic(self.nbytes, self.ranks)[1]


@dataclass(slots=True)
class Contender:
    """A job that takes turns with others."""

    job: Job
    version: str
    seconds_a_call: float = 0.0

    def has(self, case: str) -> bool:
        """Return whether the library has this case."""
        cases = LIBRARIES[self.job.library].cases
        return cases is None or case in cases

    def measure(
        self, case: str, nbytes: int, repetitions: int, warmup: int, keep: bool
    ) -> list[float]:
        """Take a turn; raise BenchmarkError when the result is wrong."""
        block = self.job.measure(case, nbytes, repetitions, warmup, keep=keep)
        if not block.right:
            raise BenchmarkError(
                f"{self.job.library}: {case} of {nbytes} bytes gave a wrong result"
            )
        self.seconds_a_call = block.turn / (repetitions + warmup)
        return [max(times) for times in block.seconds]

    def repetitions(self, rounds: int) -> int:
        """Return how many calls fit into the next turn, by what the last one took."""
        fewest = -(-_FEWEST_CALLS // rounds)
        return max(fewest, min(_MOST_IN_A_TURN, int(_TURN_SECONDS / self.seconds_a_call)))


@dataclass(slots=True)
class Skipped:
    """A case that was not measured, and why."""

    case: str
    nbytes: int
    ranks: int
    reason: str

    def __str__(self) -> str:
        size = format_size(self.nbytes)
        return f"{self.case:15}{self.ranks:>6}{size:>10}  not measured: {self.reason}"


def run(plan: Plan, progress: Progress) -> Iterator[list[Result] | Skipped]:
    """Yield the results of each case and size, a list with one for each library that has it."""
    cells = plan.cells()
    total, done = len(cells) * len(plan.ranks), 0
    for size in plan.ranks:
        with ExitStack() as stack:
            contenders: list[Contender] = []
            for library, python in plan.pythons.items():
                progress(f"starting {size} ranks of {library}", done / total)
                job = stack.enter_context(running_job(library, python, size))
                contenders.append(Contender(job, job.start()))
            for case, nbytes in cells:
                progress(f"{case} {format_size(nbytes)}, {size} ranks", done / total)
                yield _measure(plan.rounds, contenders, case, nbytes)
                done += 1


def _measure(
    rounds: int, contenders: Sequence[Contender], case: str, nbytes: int
) -> list[Result] | Skipped:
    able = [contender for contender in contenders if contender.has(case)]
    ranks = contenders[0].job.size
    needed, available = CASES[case].memory(nbytes, ranks), _available_memory()
    if needed > _LARGEST_SHARE * available:
        reason = f"needs {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} are there"
        return Skipped(case, nbytes, ranks, reason)
    keep = needed * len(able) <= _KEPT_SHARE * available
    results = [Result(case, nbytes, ranks, one.job.library, one.version) for one in able]
    for contender in able:  # finds out how long a call takes
        contender.measure(case, nbytes, 1, 1, keep)
    for round_ in range(rounds):
        pairs = list(zip(able, results, strict=True))
        # Whoever comes second finds the caches as the first has left them: take turns in that.
        for contender, result in pairs if round_ % 2 == 0 else reversed(pairs):
            repetitions = contender.repetitions(rounds)
            warmup = 1 if repetitions < _FEWEST_CALLS else 2
            last = round_ == rounds - 1
            times = contender.measure(case, nbytes, repetitions, warmup, keep and not last)
            result.rounds.append(times)
    return results


def _available_memory() -> int:
    """Return the bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise BenchmarkError("/proc/meminfo does not say how much memory is available")
