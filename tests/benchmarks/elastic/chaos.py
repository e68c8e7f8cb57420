"""Ranks of an elastic training are killed and stopped at random; what comes of it is checked.

    python -m tests.benchmarks.elastic.chaos --runs 300 --seed 0

Each run is a job of 3 to 6 ranks under ``meshrun --replace`` (DDP, HSDP or JAX's DDP), of which
ranks are lost by SIGKILL and stopped by SIGSTOP at random moments, down to one replica at worst.
Afterwards: it has ended in time, with exit code 0; all ranks that ended have the same parameters,
bit for bit; those are what one process gets from the steps that were committed (1e-10); each step's
samples are those that come next, each rank having had its share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

from tests.support.parallel import elastic_ranks as training  # noqa: E402 (beside the tests that share it)

GIVE_UP = 120.0
KINDS = {
    "ddp": [(3,), (4,), (5,), (6,)],
    "hsdp": [(2, 2), (3, 2)],
    "jax": [(3,), (4,)],
}


@dataclass
class Run:
    """One run: what is to happen, and what came of it."""

    seed: int
    kind: str
    shape: tuple[int, ...]
    until: int
    events: list[tuple[float, str]]
    spares: int
    done: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def plan(seed: int, kinds: list[str]) -> Run:
    """Return what is to happen in the run ``seed``."""
    generator = random.Random(seed)
    kind = generator.choice(kinds)
    shape = generator.choice(KINDS[kind])
    losses = generator.randint(1, max(1, int(np.prod(shape)) - 1))
    events = sorted(
        (generator.uniform(0.0, 2.5), generator.choice(["kill", "kill", "kill", "stop"]))
        for _ in range(losses)
    )
    return Run(seed, kind, shape, generator.randint(60, 150), events, generator.choice([0, 0, 1]))


def notes_of(folder: Path) -> dict[int, list[list]]:
    """Return what each rank has noted so far."""
    found = {}
    for path in folder.glob("rank-*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        found[int(path.stem.partition("-")[2])] = whole
    return found


def protected(run: Run) -> set[int]:
    """Return the ranks that keep the state: one replica is left, at worst."""
    return {0} if len(run.shape) == 1 else set(range(run.shape[1]))


def happen(run: Run, folder: Path, job: subprocess.Popen) -> None:
    """Kill and stop ranks as planned, from the moment that the training is under way."""
    generator = random.Random(run.seed + 1)
    stopped: list[tuple[float, int]] = []
    gone: set[int] = set()
    deadline = time.monotonic() + GIVE_UP
    begun = None
    events = list(run.events)
    while job.poll() is None:
        if time.monotonic() > deadline:
            run.problems.append(f"was not over after {GIVE_UP:g} s")
            job.send_signal(signal.SIGKILL)
            break
        notes = notes_of(folder)
        now = time.monotonic()
        if begun is None and any(one[0] == "commit" for own in notes.values() for one in own):
            begun = now
        if begun is not None and events and now - begun >= events[0][0]:
            _, what = events.pop(0)
            there = {rank: own[0][2] for rank, own in notes.items() if own}
            ended = {rank for rank, own in notes.items() if own and own[-1][0] in ("ends", "spare")}
            victims = sorted(set(there) - protected(run) - gone - ended)
            if victims:
                victim = generator.choice(victims)
                run.done.append(f"{what} {victim}")
                moment = time.time()
                if signalled(there[victim], signal.SIGKILL if what == "kill" else signal.SIGSTOP):
                    gone.add(victim)
                    (folder / f"event-{moment}").touch()
                if what == "stop":
                    stopped.append((now + generator.uniform(0.2, 8.0), there[victim]))
        for due, pid in list(stopped):
            if now >= due:
                stopped.remove((due, pid))
                signalled(pid, signal.SIGCONT)
        time.sleep(0.005)
    for _, pid in stopped:
        signalled(pid, signal.SIGCONT)


def signalled(pid: int, number: signal.Signals) -> bool:
    """Send a rank ``number``; return whether it was there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def check(run: Run, folder: Path, code: int, text: str) -> None:
    """Note what is not as it must be."""
    if code:
        run.problems.append(f"exit code {code}: {text[-1500:]}")
        return
    notes = notes_of(folder)
    results, log = {}, []
    batches = training.make_batches()
    for rank, own in notes.items():
        for what, *values in own:
            if what == "ends":
                shapes = [array.shape for array in training.replay([])]
                arrays = [
                    np.frombuffer(bytes.fromhex(text)).reshape(shape)
                    for text, shape in zip(values[2], shapes, strict=True)
                ]
                results[rank] = (arrays, values[1])
            elif what == "commit":
                log.append((rank, values[1], values[2]))
    if not results:
        run.problems.append("nobody has ended with a result")
        return
    tried = {number: ranks for rank, number, ranks in log if rank in results}
    order, cursor = [], 0
    for number in range(run.until):
        if number not in tried:  # committed before any that is left had arrived
            earlier = [ranks for _, n, ranks in log if n == number]
            if not earlier:
                run.problems.append(f"nobody has noted step {number}")
                return
            tried[number] = earlier[-1]
        ranks = tried[number]
        noted = [rank for rank, n, mesh in log if n == number and mesh == ranks]
        if len(set(noted)) != len(noted):
            run.problems.append(f"step {number} was committed twice by one of {noted}")
        samples = np.concatenate(
            [batches.share(cursor, i, len(ranks), 1).samples for i in range(len(ranks))]
        )
        order.append(samples)
        cursor += len(samples)
    expected = training.replay(order)
    first = next(iter(results.values()))
    for rank, (arrays, committed) in results.items():
        if committed != run.until:
            run.problems.append(f"rank {rank} has ended after {committed} steps")
        for mine, theirs, replayed in zip(arrays, first[0], expected, strict=True):
            if mine.tobytes() != theirs.tobytes():
                run.problems.append(f"rank {rank} has other parameters than another one")
            if np.abs(mine - replayed).max() > 1e-10:
                run.problems.append(
                    f"rank {rank} is off the replay by {np.abs(mine - replayed).max():.3g}"
                )
    commits = sorted(
        values[0] for own in notes.values() for what, *values in own if what == "commit"
    )
    for path in folder.glob("event-*"):
        moment = float(path.name.partition("-")[2])
        # The first commit without the lost rank: the step under way may have been voted for.
        after = [at for at in commits if at > moment + 0.05]
        run.gaps.append(after[0] - moment if after else 0.0)


def carry_out(run: Run) -> None:
    """Carry the run out and check it."""
    with tempfile.TemporaryDirectory(prefix="elastic-chaos-") as name:
        folder = Path(name)
        shape = "x".join(map(str, run.shape))
        options = ["--replace", str(len(run.events)), "--spares", str(run.spares)]
        command = [
            *(sys.executable, "-m", "meshlib._launcher", "-n", str(int(np.prod(run.shape)))),
            *options,
            *(str(HERE / "program.py"), name, run.kind, shape, str(run.until)),
        ]
        begun = time.monotonic()
        with (folder / "output").open("w+") as output:
            job = subprocess.Popen(command, stdout=output, stderr=output)
            happen(run, folder, job)
            code = job.wait(30)
            output.seek(0)
            text = output.read()
        run.seconds = time.monotonic() - begun
        if not run.problems:
            check(run, folder, code, text)
        else:
            run.problems.append(text[-3000:])
            run.problems.append(str({r: own[-1][:3] for r, own in notes_of(folder).items()}))


def main(
    what: str | None,
    runs: int,
    plan: Callable[[int, list[str]], Run],
    carry_out: Callable[[Run], None],
) -> int:
    """Carry out the runs that the command line asks for, by default ``runs``; see ``what``."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="ddp,hsdp,jax")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    begun, failed, count, gaps = time.monotonic(), 0, Counter[str](), []
    for seed in range(given.seed, given.seed + given.runs):
        if time.monotonic() - begun > given.seconds:
            break
        run = plan(seed, given.kinds.split(","))
        carry_out(run)
        count[run.kind] += 1
        failed += bool(run.problems)
        gaps += run.gaps
        print(
            f"{seed}: {run.kind} {run.shape}, {run.until} steps, {run.spares} spares:"
            f" {', '.join(run.done)}: {run.seconds:.1f} s {run.problems or 'as it must be'}",
            flush=True,
        )
    print(f"{sum(count.values())} runs ({dict(count)}), {failed} not as they must be")
    if gaps:
        print(f"from the event to the next commit: median {statistics.median(gaps):.2f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(__doc__, 300, plan, carry_out))
