"""Measures cases in several libraries' jobs, interleaved, so that all meet the same weather."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from meshlib.bench.job import BenchmarkError, Job, running_job

_BLOCK_BYTES = 48 << 20
_FEWEST, _MOST = 3, 50
_WARMUP = 2

Progress = Callable[[str], None]


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


@dataclass(slots=True)
class Result:
    """One case, size and number of ranks in one library. Seconds of the slowest rank of each
    repetition.
    """

    case: str
    nbytes: int
    ranks: int
    library: str
    version: str
    right: bool = True
    seconds: list[float] = field(default_factory=list[float])

    @property
    def median(self) -> float:
        """The median of ``seconds``."""
        return statistics.median(self.seconds)

    def quantile(self, tenth: int) -> float:
        """Return the ``tenth`` tenth's upper bound of ``seconds``."""
        return statistics.quantiles(self.seconds, n=10, method="inclusive")[tenth - 1]


def run(plan: Plan, progress: Progress) -> Iterator[list[Result]]:
    """Yield the results of each case and size, a list with one for each library."""
    for size in plan.ranks:
        with ExitStack() as stack:
            jobs: list[tuple[Job, str]] = []
            for library, python in plan.pythons.items():
                progress(f"starting {size} ranks of {library}")
                job = stack.enter_context(running_job(library, python, size))
                jobs.append((job, job.start()))
            for case in plan.cases:
                for nbytes in plan.sizes if case != "barrier" else [0]:
                    yield _measure(plan, jobs, case, nbytes, progress)


def _measure(
    plan: Plan, jobs: Sequence[tuple[Job, str]], case: str, nbytes: int, progress: Progress
) -> list[Result]:
    repetitions = max(_FEWEST, min(_MOST, _BLOCK_BYTES // max(nbytes, 1)))
    results = [Result(case, nbytes, job.size, job.library, version) for job, version in jobs]
    for round_ in range(plan.rounds):
        progress(f"{case} {nbytes} bytes, {jobs[0][0].size} ranks: {round_ + 1}/{plan.rounds}")
        pairs = list(zip(jobs, results, strict=True))
        # Whoever comes second finds the caches as the first has left them: take turns in that.
        for (job, _), result in pairs if round_ % 2 == 0 else reversed(pairs):
            block = job.measure(case, nbytes, repetitions, _WARMUP)
            if not block.right:
                raise BenchmarkError(f"{job.library}: {case} of {nbytes} bytes gave a wrong result")
            result.seconds += [max(times) for times in block.seconds]
    return results
