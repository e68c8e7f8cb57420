"""The cost of data parallel training in a training step, libraries taking turns.

    python -m tests.benchmarks.setup_peers gloo
    python -m tests.benchmarks.data_parallel

4 × Linear(2048), batch 64 on each of 2 ranks, one thread each. A step is forward, backward and
SGD. In each round every library makes steps on its own and synchronised ones; what is added is
the difference of the two medians, of the slowest rank of each step. "+ cpu" is the processor time
that a rank's threads together take more in synchronised steps: the medians' difference, for each
rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from meshlib._bench.jobs.job import BenchmarkError, LibraryJob, running_job
from meshlib._bench.libraries.environments import python_of
from tests.benchmarks.data_parallel.trainers import TRAINERS

_REPETITIONS, _WARMUP = 4, 1

# Larger blocks than 32 MiB are otherwise given back when they are freed, and cleared page by page
# when they are asked for again: XLA does both in each step with the gradients of a whole model.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}


@dataclass
class Contender:
    """One library's job, and the seconds of its steps, alone and synchronised."""

    job: LibraryJob
    version: str
    alone: list[float] = field(default_factory=list[float])
    together: list[float] = field(default_factory=list[float])
    hidden: list[float] = field(default_factory=list[float])
    processor: dict[bool, list[list[float]]] = field(default_factory=lambda: {False: [], True: []})
    """Of steps that are synchronised or not: what each rank (by rank) used, step by step."""

    def take_turn(self, synchronise: bool) -> None:
        """Make some steps. Raises BenchmarkError when the ranks' weights are no longer equal."""
        answers = self.job.query(
            {"synchronise": synchronise, "repetitions": _REPETITIONS, "warmup": _WARMUP}
        )
        if len({answer["weights"] for answer in answers}) > 1:
            raise BenchmarkError(f"{self.job.library}: the ranks' weights differ")
        times = self.together if synchronise else self.alone
        times += [max(t) for t in zip(*(answer["seconds"] for answer in answers), strict=True)]
        used = self.processor[synchronise]
        for rank, answer in enumerate(answers):
            if len(used) == rank:
                used.append([])
            used[rank] += answer["processor"]
        if synchronise and answers[0]["hidden"] is not None:
            self.hidden.append(answers[0]["hidden"])

    def row(self, reference: Contender) -> str:
        """Return one line: milliseconds, and what is added over what ``reference`` adds."""
        alone, together = statistics.median(self.alone), statistics.median(self.together)
        theirs = statistics.median(reference.together) - statistics.median(reference.alone)
        added = together - alone
        hidden = f"{statistics.median(self.hidden):>8.0%}" if self.hidden else f"{'':>8}"
        more = "/".join(
            f"{1e3 * (statistics.median(together) - statistics.median(alone)):.0f}"
            for alone, together in zip(self.processor[False], self.processor[True], strict=True)
        )
        return (
            f"{self.job.library:13}{1e3 * alone:>10.1f}{1e3 * together:>10.1f}{1e3 * added:>10.1f}"
            f"{added / theirs:>10.2f}{hidden}{more:>10}  {self.version}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return an exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trainers", default=",".join(TRAINERS), help="comma-separated names")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64, help="on each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--keep-memory", action="store_true", help="have malloc keep freed memory, for everybody"
    )
    args = parser.parse_args(argv)
    if args.keep_memory:
        os.environ.update(_KEEP_MEMORY)
    names = args.trainers.split(",")
    try:
        with ExitStack() as stack:
            contenders: list[Contender] = []
            for name in names:
                python = python_of("gloo") if name.startswith("torch") else sys.executable
                job = stack.enter_context(
                    running_job(name, python, args.ranks, "tests.benchmarks.data_parallel.worker")
                )
                contenders.append(Contender(job, job.start()))
                job.query({"build": {"width": args.width, "batch": args.batch}})
            for round_ in range(args.rounds):
                turns = contenders if round_ % 2 == 0 else contenders[::-1]
                for contender in turns:
                    contender.take_turn(synchronise=False)
                    contender.take_turn(synchronise=True)
    except BenchmarkError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    columns = (
        f"{'ms':13}{'alone':>10}{'together':>10}{'added':>10}{'/ ' + names[0]:>10}{'hidden':>8}"
        f"{'+ cpu':>10}"
    )
    print(columns)
    for contender in contenders:
        print(contender.row(contenders[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
