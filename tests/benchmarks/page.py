"""The figures of docs/measurements/benchmarks.md: measured into one JSON, then drawn and written.

    python -m tests.benchmarks.setup_peers
    python -m tests.benchmarks.page              # measures everything; 20 minutes
    python -m tests.benchmarks.page --draw       # pictures and tables from benchmarks.json

``benchmarks.json`` beside the page has the machine, the versions and every median. The pictures go
to ``docs/pictures``; the tables replace the text between the page's markers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from meshlib._bench.libraries.environments import is_set_up, python_of
from meshlib._bench.sizes import format_size

FOLDER = Path(__file__).parents[2] / "docs" / "measurements"
FIGURES, PAGE = FOLDER / "benchmarks.json", FOLDER / "benchmarks.md"
PICTURES = FOLDER.with_name("pictures")
SIZES = "8,4K,64K,1M,16M,64M"
RANKS = (2, 4)
NAMES = {
    "meshlib-shm": "meshlib",
    "meshlib-tcp": "meshlib over TCP",
    "gloo": "Gloo",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "jax": "JAX",
}
SHARED_MEMORY, NETWORK = ("meshlib-shm", "openmpi", "mpich"), ("meshlib-tcp", "gloo", "jax")
MPI = SHARED_MEMORY[1:]

HELLO = """
import numpy as np
import meshlib as dist

dist.init_process_group()
dist.all_reduce(np.ones(4))
dist.destroy_process_group()
"""
HELLO_MPI = """
import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Allreduce(np.ones(4), np.empty(4))
"""


def measure(rounds: int, sizes: str) -> dict[str, Any]:
    """Measure all collectives and the start of ranks; return what ``benchmarks.json`` holds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "meshlib", "bench", "--collectives", "all"]
        command += ["--vs", "gloo,openmpi,mpich,jax", "--backend", "shm,tcp", "--sizes", sizes]
        command += ["--ranks", ",".join(map(str, RANKS)), "--rounds", str(rounds)]
        subprocess.run([*command, "--json", str(file)], check=True)
        measured = json.loads(file.read_text())
        start = _starts(Path(folder), rounds)
    keep = ("case", "bytes", "ranks", "library", "version", "median_us")
    results = [{key: result[key] for key in keep} for result in measured["results"]]
    machine = {**measured["machine"], "date": date.today().isoformat(), "rounds": rounds}
    return {"machine": machine, "results": results, "start": start}


def _starts(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Time a program that joins, sums four numbers and leaves: the shell's view, by turns."""
    ours, theirs = folder / "hello.py", folder / "hello_mpi.py"
    ours.write_text(HELLO)
    theirs.write_text(HELLO_MPI)
    commands: dict[str, Callable[[int], list[str]]] = {
        "meshlib-shm": lambda n: [
            *(sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", str(n), str(ours))
        ]
    }
    if is_set_up("mpich"):
        python = python_of("mpich")
        launcher = str(Path(python).with_name("mpiexec"))
        commands["mpich"] = lambda n: [launcher, "-n", str(n), python, str(theirs)]
    results: list[dict[str, Any]] = []
    for ranks in (2, 8, 32):
        seconds: dict[str, list[float]] = {library: [] for library in commands}
        for _ in range(rounds + 1):
            for library, command in commands.items():
                begin = time.perf_counter()
                subprocess.run(command(ranks), check=True)
                seconds[library].append(time.perf_counter() - begin)
        results += [
            {"ranks": ranks, "library": library, "seconds": round(statistics.median(taken[1:]), 3)}
            for library, taken in seconds.items()
        ]
    return results


def draw(figures: dict[str, Any]) -> None:
    """Draw time over size, a panel for each collective, a picture for each way and rank count."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    PICTURES.mkdir(exist_ok=True)
    for way, libraries in (("shared-memory", SHARED_MEMORY), ("tcp", NETWORK)):
        for ranks in RANKS:
            cells = [r for r in figures["results"] if r["ranks"] == ranks and r["bytes"]]
            cases = list(dict.fromkeys(r["case"] for r in cells if r["case"] != "copy"))
            picture, axes = pyplot.subplots(3, 3, figsize=(11, 9), layout="constrained")
            for axis, case in zip(axes.flat, cases, strict=True):
                for color, library in enumerate(libraries):
                    points = sorted(
                        (r["bytes"], r["median_us"])
                        for r in cells
                        if (r["case"], r["library"]) == (case, library)
                    )
                    style = "o-" if library.startswith("meshlib") else "s--"
                    if points:
                        x, y = zip(*points, strict=True)
                        axis.loglog(x, y, style, color=f"C{color}", label=NAMES[library])
                axis.set(title=case, xlabel="bytes", ylabel="µs")
                axis.grid(visible=True, alpha=0.3)
            axes.flat[0].legend()
            picture.savefig(PICTURES / f"{way}-{ranks}.png", dpi=80)
            pyplot.close(picture)


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the page's tables by the names of their markers."""
    machine = figures["machine"]
    versions = {r["library"]: r["version"] for r in figures["results"]}
    about = f"{machine['cores']} cores of {machine['processor']}, {machine['system']}, "
    about += f"Python {machine['python']}, NumPy {machine['numpy']}; " + "; ".join(
        version for name, version in versions.items() if not name.startswith("meshlib")
    )
    found = {"machine": f"{about}. {machine['rounds']} rounds, {machine['date']}."}
    for marker, own, peers in (
        ("shared-memory", "meshlib-shm", MPI),
        ("tcp", "meshlib-tcp", ("gloo",)),
    ):
        for ranks in RANKS:
            found[f"{marker}-{ranks}"] = _ratios(figures["results"], ranks, own, peers)
    taken = {(r["ranks"], r["library"]): r["seconds"] for r in figures["start"]}
    lines = ["| ranks | meshrun, s | MPICH, s | ratio |", "|---:|---:|---:|---:|"]
    for ranks in sorted({ranks for ranks, _ in taken}):
        ours, theirs = taken[ranks, "meshlib-shm"], taken.get((ranks, "mpich"))
        ratio = "–" if theirs is None else f"{ours / theirs:.2f}"
        lines.append(f"| {ranks} | {ours:.2f} | {theirs or '–'} | {ratio} |")
    return {**found, "start": "\n".join(lines)}


def _ratios(results: Sequence[dict[str, Any]], ranks: int, own: str, peers: Sequence[str]) -> str:
    """Return a table of our time over the fastest peer's, a line for each collective."""
    times = {
        (r["case"], r["bytes"], r["library"]): r["median_us"]
        for r in results
        if r["ranks"] == ranks and r["case"] != "copy"
    }
    sizes = sorted({size for _, size, _ in times if size})
    lines = ["| | " + " | ".join(format_size(size) for size in sizes) + " |"]
    lines.append("|---|" + "---:|" * len(sizes))
    for case in dict.fromkeys(case for case, _, _ in times):
        row: list[str] = []
        for size in sizes if (case, 0, own) not in times else [0]:
            theirs = [times[case, size, peer] for peer in peers if (case, size, peer) in times]
            ours = times.get((case, size, own))
            row.append("–" if ours is None or not theirs else f"{ours / min(theirs):.2f}")
        lines.append(f"| {case} | " + " | ".join(row + [""] * (len(sizes) - len(row))) + " |")
    return "\n".join(lines)


def write(figures: dict[str, Any]) -> None:
    """Replace the tables of docs/measurements/benchmarks.md."""
    text = PAGE.read_text()
    for name, table in tables(figures).items():
        text, found = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, table=table: f"{match[1]}{table}\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
        if not found:
            raise ValueError(f"{PAGE}: expected the marker <!-- {name} -->")
    PAGE.write_text(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure unless ``--draw`` says otherwise; draw the pictures and write the tables."""
    parser = argparse.ArgumentParser(description=f"Measure and draw {PAGE.name}.")
    parser.add_argument("--draw", action="store_true", help=f"use {FIGURES.name} as it is")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each library (4)")
    parser.add_argument("--sizes", default=SIZES, help=f"bytes of each rank's input ({SIZES})")
    given = parser.parse_args(argv)
    if not given.draw:
        FIGURES.write_text(
            json.dumps(measure(given.rounds, given.sizes)).replace("}, ", "},\n") + "\n"
        )
    figures = json.loads(FIGURES.read_text())
    draw(figures)
    write(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
