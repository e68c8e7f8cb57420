"""Measures the GPU backends: ``bench.py REPORT`` runs ranks of itself and writes the report.

The floor of an all_reduce of N bytes by P ranks on one GPU is the time in which the device copies
what has to move: each rank reads P parts of N / P bytes and writes one, then reads and writes the
P - 1 others. Copies read and write each byte once, and their bandwidth is measured here.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import meshlib as dist

LARGE, SMALL = 256 << 20, 4096
WAYS = [("staged", 2), ("cuda_ipc", 2), ("cuda_ipc", 4), ("nccl", 1)]


def timed(cupy: Any, function: Any, repeats: int) -> float:
    """The least seconds of several calls, each seen to its end on the device."""
    best = float("inf")
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        function()
        cupy.cuda.get_current_stream().synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def best_copy(cupy: Any, into: Any, source: Any) -> float:
    """The least seconds of several copies on the device."""
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        cupy.copyto(into, source)
        cupy.cuda.get_current_stream().synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def rank_main(backend: str, path: str) -> None:
    cupy = import_module("cupy")
    dist.init_process_group(f"cpu:auto,cuda:{backend}", timeout=120)
    big = cupy.ones(LARGE // 4, cupy.float32)
    other = cupy.empty_like(big)
    small = cupy.ones(SMALL // 4, cupy.float32)
    copy = 0.0
    for turn in range(dist.get_world_size()):  # one rank after the other has the device alone
        dist.barrier()
        if turn == dist.get_rank():
            copy = best_copy(cupy, other, big)
    result = {
        "copy": copy,
        "large": timed(cupy, lambda: dist.all_reduce(big), 10),
        "small": timed(cupy, lambda: dist.all_reduce(small), 200),
    }
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(result))
    dist.destroy_process_group()


def one_row(backend: str, ranks: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "meshlib.launcher.cli", f"--nproc-per-node={ranks}"]
        done = subprocess.run(
            [*command, __file__, "--rank", backend, str(out)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            return f"| {backend} | {ranks} | failed: {done.stderr.strip().splitlines()[-1]} | | |"
        result = json.loads(out.read_text())
    # Bytes read and written by all ranks together, in units of what one copy of the array moves;
    # the device copies alone here, so that its whole bandwidth is the measure.
    moved = ranks * (1 + 1 / ranks + 2 * (ranks - 1) / ranks) / 2
    ratio = result["large"] / (moved * result["copy"]) if ranks > 1 else float("nan")
    large, small = 1e3 * result["large"], 1e6 * result["small"]
    return f"| {backend} | {ranks} | {large:.2f} | {ratio:.2f} | {small:.0f} |"


def main() -> None:
    if sys.argv[1] == "--rank":
        rank_main(*sys.argv[2:])
        return
    from transport.cuda import load_driver

    cupy = import_module("cupy")
    assert load_driver().device_count()
    card = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    today = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [
        f"# GPU check of {today}, on {card}",
        "",
        "| backend | ranks | all_reduce of 256 MiB, ms | times the floor | of 4 KiB, µs |",
        "|---|---|---|---|---|",
        *(one_row(backend, ranks) for backend, ranks in WAYS),
        "",
    ]
    Path(sys.argv[1]).write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
