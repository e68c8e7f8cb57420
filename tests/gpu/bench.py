"""Measures the GPU backends: ``bench.py --table FILE`` runs ranks of itself and writes a table.

The table is written row by row: whoever is ended leaves what there was. Exit status 1 when
something did not run, or cuda_ipc took longer than ``MOST`` times the floor.

The floor of an all_reduce of N bytes by P ranks on one GPU is the time in which the device copies
what has to move: each rank reads P parts of N / P bytes and writes one, then reads and writes the
P - 1 others. Copies read and write each byte once, and their bandwidth is measured here.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import meshlib as dist
from tests.support.gpu import ended

_WAY_SECONDS = 60
LARGE, SMALL = 256 << 20, 4096
MOST = 1.5
WAYS = [("staged", 2), ("cuda_ipc", 2), ("cuda_ipc", 4), ("nccl", 1)]


def timed(cupy: Any, function: Any, repeats: int) -> list[float]:
    """The seconds of several calls, each seen to its end on the device."""
    stream = cupy.cuda.get_current_stream()
    for _ in range(3):
        function()
    found: list[float] = []
    for _ in range(repeats):
        stream.synchronize()
        dist.barrier()
        start = time.perf_counter()
        function()
        stream.synchronize()
        found.append(time.perf_counter() - start)
    return found


def copies(cupy: Any, into: Any, source: Any) -> list[float]:
    """The seconds of several copies on the device."""
    stream = cupy.cuda.get_current_stream()
    found: list[float] = []
    for _ in range(13):
        stream.synchronize()
        start = time.perf_counter()
        cupy.copyto(into, source)
        stream.synchronize()
        found.append(time.perf_counter() - start)
    return found[3:]


def rank_main(backend: str, path: str) -> None:
    cupy = import_module("cupy")
    dist.init_process_group(f"cpu:auto,cuda:{backend}", timeout=120)
    big = cupy.ones(LARGE // 4, cupy.float32)
    other = cupy.empty_like(big)
    small = cupy.ones(SMALL // 4, cupy.float32)
    symmetric = dist.group.WORLD.empty(SMALL // 4, "float32", device="cuda")
    symmetric.fill(1)
    copy: list[float] = []
    for turn in range(dist.get_world_size()):  # one rank after the other has the device alone
        dist.barrier()
        if turn == dist.get_rank():
            copy = copies(cupy, other, big)
    big *= 0  # sums of ones would overflow in the course of it
    small *= 0
    symmetric *= 0
    result = {
        "copy": statistics.median(copy),
        "large": statistics.median(timed(cupy, lambda: dist.all_reduce(big), 20)),
        "small": statistics.median(timed(cupy, lambda: dist.all_reduce(small), 200)),
        "symmetric": statistics.median(timed(cupy, lambda: dist.all_reduce(symmetric), 200)),
    }
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(result))
    dist.destroy_process_group()


def one_row(backend: str, ranks: int) -> tuple[bool, str]:
    """Return whether it ran and met its aim, and a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        said = Path(folder) / "said"
        command = [sys.executable, "-m", "meshlib._launcher", f"--nproc-per-node={ranks}"]
        command += [__file__, "--rank", backend, str(out)]
        status = ended.run(command, _WAY_SECONDS, said)
        text = said.read_text(errors="replace").strip()
        if status or not out.exists():
            print(f"{backend}, {ranks} ranks, exit status {status}:\n{text}\n", flush=True)
            last = (text.splitlines() or ["nothing said"])[-1].replace("|", "/")
            if status == ended.TIMED_OUT:
                last = f"ended after {_WAY_SECONDS} s; {last}"
            return False, f"| {backend} | {ranks} | failed: {last} | | | | |"
        result = json.loads(out.read_text())
    # Bytes read and written by all ranks together, in units of what one copy of the array moves;
    # the device copies alone here, so that its whole bandwidth is the measure.
    moved = ranks * (1 + 1 / ranks + 2 * (ranks - 1) / ranks) / 2
    ratio = result["large"] / (moved * result["copy"]) if ranks > 1 else float("nan")
    bandwidth = 2 * LARGE / result["copy"] / 1e9
    large, small = 1e3 * result["large"], 1e6 * result["small"]
    symmetric = 1e6 * result["symmetric"]
    met = not (backend == "cuda_ipc" and ranks == 2 and ratio > MOST)
    if not met:
        print(f"{backend}, {ranks} ranks: {ratio:.2f} times the floor, not {MOST}", flush=True)
    return met, (
        f"| {backend} | {ranks} | {large:.3f} | {ratio:.2f} | {small:.0f} | {symmetric:.0f} |"
        f" {bandwidth:.0f} |"
    )


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "--rank":
        rank_main(*rest)
        return 0
    head = "all_reduce of 256 MiB, ms | times the floor | of 4 KiB, µs | in symmetric memory, µs"
    lines = [
        f"Medians. The aim: cuda_ipc with 2 ranks takes at most {MOST} times the floor.",
        "",
        f"| backend | ranks | {head} | copy, GB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    good = True
    for backend, ranks in WAYS:
        met, row = one_row(backend, ranks)
        good = good and met
        lines.append(row)
        Path(rest[0]).write_text("\n".join(lines) + "\n")
        print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
