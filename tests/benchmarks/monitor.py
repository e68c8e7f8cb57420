"""What a watched job costs: ``python -m tests.benchmarks.monitor [--ranks N] [--rounds N]``.

Jobs of ``meshrun`` whose steps are fixed work, by turns with ``--monitor``, with a reader who asks
for the page's values and the metrics once a second, and without. Compared is processor time: of
the ranks for a step, and of the launcher for a second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

_PROGRAM = """
import os, sys, time
import numpy as np
import meshlib as dist

steps, calls, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
mesh = dist.init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
matrix = np.random.default_rng(0).standard_normal((160, 160))
gradient = np.ones(1000, np.float32)

def step():
    product = matrix
    for _ in range(60):
        product = matrix @ product
        product /= np.abs(product).max()
    for _ in range(calls):
        mesh.all_reduce(gradient, dist.ReduceOp.MAX)

for _ in range(20):
    step()
begin, clock = time.process_time(), time.monotonic()
for _ in range(steps):
    step()
with open(os.path.join(folder, os.environ["RANK"]), "w") as file:
    file.write(f"{time.process_time() - begin} {time.monotonic() - clock}")
"""


def main() -> int:
    """Print what each round took, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    ratios: list[float] = []
    launchers: list[float] = []
    for i in range(options.rounds):
        found: dict[bool, tuple[float, float, float]] = {}
        for watched in (False, True) if i % 2 else (True, False):
            found[watched] = _run(watched, options.ranks, options.steps, options.calls)
        (plain, clock, idle), (seen, _, busy) = found[False], found[True]
        ratios.append(seen / plain)
        launchers.append(busy - idle)
        print(
            f"round {i}: ms of processor time a step of all ranks: {plain:.3f} plain, {seen:.3f}"
            f" watched ({seen / plain:.4f}); {clock:.1f} ms by the clock; ms a second of the"
            f" launcher: {idle:.2f} plain, {busy:.2f} watched",
            flush=True,
        )
    print(
        f"medians: a step takes {statistics.median(ratios):.4f} of the processor time; the launcher"
        f" takes {statistics.median(launchers):.2f} ms a second more"
    )
    return 0


def _run(watched: bool, ranks: int, steps: int, calls: int) -> tuple[float, float, float]:
    """Return milliseconds: of processor time a step, by the clock, of the launcher a second."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "program.py"
        script.write_text(_PROGRAM)
        begin = time.monotonic()
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "meshlib.launcher.cli", "--start", "exec"),
                *(("--monitor",) if watched else ()),
                *("-n", str(ranks), str(script), str(steps), str(calls), name),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        ended = threading.Event()
        reader = threading.Thread(target=_read, args=(process, ended), daemon=True)
        reader.start()
        launcher = 0.0
        while process.poll() is None:
            with suppress(OSError, IndexError):
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                launcher = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            time.sleep(0.1)
        seconds = time.monotonic() - begin
        ended.set()
        reader.join()
        told = [(folder / str(rank)).read_text().split() for rank in range(ranks)]
    spent = sum(float(one[0]) for one in told)
    clock = max(float(one[1]) for one in told)
    return spent / steps * 1e3, clock / steps * 1e3, launcher / seconds * 1e3


def _read(process: subprocess.Popen[str], ended: threading.Event) -> None:
    """Ask for what the page and Prometheus ask for, once a second."""
    assert process.stderr is not None
    found = re.search(r"(http://\S+/)#(\S+)", process.stderr.readline())
    if found is None:
        return
    while not ended.wait(1.0):
        for path in ("job", "metrics"):
            request = urllib.request.Request(found[1] + path)
            request.add_header("Authorization", f"Bearer {found[2]}")
            with suppress(OSError), urllib.request.urlopen(request, timeout=10) as answer:
                json.loads(answer.read()) if path == "job" else answer.read()


if __name__ == "__main__":
    sys.exit(main())
