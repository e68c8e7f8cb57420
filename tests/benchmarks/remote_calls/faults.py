"""Workers of remote calls that are killed or stopped at any moment, many times over.

    python -m tests.benchmarks.remote_calls.faults [--runs 200] [--seed 1]

Each run is a job of three workers. One is killed (SIGKILL) or stopped (SIGSTOP, and continued
later) at a random moment while it is called, fetched from, given references, calls and holds
itself, or ends. A run is good when all others end well, within a deadline, and whoever needed the
victim was told its name: that it was killed by SIGKILL, or that it does not answer.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
PHASES = ("call", "fetch", "grant", "caller", "end")


def run(kind: str, phase: str, seed: int) -> str:
    """Run one job; return an empty string, or what was wrong."""
    command = [sys.executable, "-m", "meshlib._launcher", "-n", "3"]
    command += ["--on-failure", "continue", str(PROGRAM), kind, phase, str(seed)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=os.environ
        )
    except subprocess.TimeoutExpired as late:
        return f"hung: {late.stdout!r} {late.stderr!r}"
    good = {line for line in done.stdout.splitlines() if line.startswith("good")}
    wanted = {"good 0", "good 1"} | ({"good 2"} if kind == "stop" else set())
    if done.returncode or not wanted <= good:
        return f"code {done.returncode}, {sorted(good)}\n{done.stdout}{done.stderr}"
    return ""


def main() -> int:
    """Run the jobs; 1 if one was bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    chance, bad = random.Random(given.seed), 0
    for number in range(given.runs):
        kind, phase = ("kill", "stop")[number % 2], PHASES[number // 2 % len(PHASES)]
        begin = time.monotonic()
        wrong = run(kind, phase, chance.randrange(1 << 30))
        bad += bool(wrong)
        result = f"BAD: {wrong}" if wrong else "good"
        print(f"{number} {kind} {phase} {time.monotonic() - begin:.1f} s {result}", flush=True)
    print(f"{given.runs - bad} of {given.runs} good")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
