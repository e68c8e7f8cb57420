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
import tempfile
import time
from pathlib import Path

PROGRAM = """
import os, random, signal, sys, threading, time
import meshlib as dist
from meshlib import rpc
from meshlib.rpc._worker import current_worker

kind, phase, seed = sys.argv[1], sys.argv[2], int(sys.argv[3])
VICTIM = 2

class Thing:
    def __init__(self): self.value = list(range(1000))
    def get(self): return len(self.value)

def whoami(): return os.getpid()
def use(rref): return rref.rpc_sync().get()
def ping(): return None
def work(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        rref = rpc.remote(0, Thing)
        rpc.rpc_sync(0, ping)
        rpc.rpc_sync(1, use, (rref,))

dist.init_process_group()
me = dist.get_rank()
rpc.init_rpc(f"worker{me}", rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=2.0))
if me == 0:
    pid = rpc.rpc_sync(VICTIM, whoami)
    number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
    def strike():
        time.sleep(random.Random(seed).uniform(0.0, 0.3))
        os.kill(pid, number)
        if kind == "stop":
            time.sleep(6.0)
            os.kill(pid, signal.SIGCONT)
    striking = threading.Thread(target=strike)
    striking.start()
    error = None
    theirs = rpc.rpc_async(VICTIM, work, (8.0,), timeout=30) if phase == "caller" else None
    until = time.monotonic() + 20
    while error is None and phase != "end":
        assert time.monotonic() < until, "nothing was noticed"
        try:
            if phase == "call":
                rpc.rpc_sync(VICTIM, ping)
            elif phase == "fetch":
                rpc.remote(VICTIM, Thing).to_here()
            elif phase == "grant":
                rpc.rpc_sync(1, use, (rpc.remote(VICTIM, Thing),))
            elif kind == "kill":
                theirs.wait()
            else:
                rpc.rpc_sync(VICTIM, ping)
        except dist.DistError as caught:
            error = caught
    striking.join()
    if error is not None:
        text = str(error)
        word = "was killed by SIGKILL" if kind == "kill" else "passed its deadline of 2 s"
        assert f"worker{VICTIM}" in text or "worker1" in text, text
        assert word in text, text
    until = time.monotonic() + 20
    while phase == "caller" and kind == "kill" and len(current_worker().references):
        assert time.monotonic() < until, "what the victim held was not freed"
        time.sleep(0.01)
rpc.shutdown(timeout=40)
print("good", me, flush=True)
"""
PHASES = ("call", "fetch", "grant", "caller", "end")


def run(kind: str, phase: str, seed: int) -> str:
    """Run one job; return an empty string, or what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "faults.py"
        program.write_text(PROGRAM)
        command = [sys.executable, "-m", "meshlib._launcher", "-n", "3"]
        command += ["--on-failure", "continue", str(program), kind, phase, str(seed)]
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
        said = f"BAD: {wrong}" if wrong else "good"
        print(f"{number} {kind} {phase} {time.monotonic() - begin:.1f} s {said}", flush=True)
    print(f"{given.runs - bad} of {given.runs} good")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
