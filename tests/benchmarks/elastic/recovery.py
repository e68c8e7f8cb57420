"""How long training stands still when a rank of four is killed, beside torchrun and torchft.

    python -m tests.benchmarks.elastic.recovery --mib 256 --rounds 3 --torch-python PYTHON

By turns: ``meshrun --replace``, ``meshrun --spares``, and, with a Python that has torch (and
torchft), ``torchrun --max-restarts`` and torchft's manager, whose launcher (here: this program)
starts the replica again. Medians of the seconds from SIGKILL to the next step that a rank commits,
and to the first that all four commit again; ``--stations`` prints what a new rank did meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
GIVE_UP = 90.0
RANKS, VICTIM = 4, 2
Notes = dict[int, list[tuple[str, float]]]


@dataclass
class Job:
    """Ranks that run; ``again()`` is called when one was killed."""

    folder: Path
    again: Callable[[], object]

    def notes(self) -> Notes:
        """Return what each rank has noted so far."""
        found: Notes = {}
        for path in self.folder.glob("rank-*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            found[int(path.stem.partition("-")[2])] = [(what, at) for what, at in whole]
        return found

    def wait(self, due: Callable[[Notes], bool]) -> Notes:
        """Return the notes once ``due`` is true of them."""
        deadline = time.monotonic() + GIVE_UP
        while not due(notes := self.notes()):
            if time.monotonic() > deadline:
                ends = {rank: own[-1:] for rank, own in notes.items()}
                raise TimeoutError(f"not after {GIVE_UP:g} s: {ends}")
            time.sleep(0.02)
        return notes


@contextlib.contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes that are ended with the block."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        yield started
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command, whose words go to a file."""
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **variables}
        )


def meshrun(options: list[str], mib: int, folder: Path, started: list) -> Job:
    """Start ours."""
    program = str(HERE / "recovery_program.py")
    command = [sys.executable, "-m", "meshlib._launcher", "-n", str(RANKS), *options, program]
    started.append(start([*command, str(folder), str(mib), "1000000"], folder))
    return Job(folder, lambda: None)


def torchrun(python: str, mib: int, folder: Path, started: list) -> Job:
    """Start torchrun."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    program = [str(HERE / "recovery_torch.py"), str(folder), str(mib)]
    lo = {"GLOO_SOCKET_IFNAME": "lo"}
    started.append(start([*command, "--nproc-per-node", str(RANKS), *program], folder, **lo))
    return Job(folder, lambda: None)


def torchft(python: str, mib: int, folder: Path, started: list) -> Job:
    """Start a lighthouse and the replicas."""
    port = 29533
    lighthouse = [str(Path(python).with_name("torchft_lighthouse"))]
    options = ["--min_replicas", "1", "--join_timeout_ms", "500", "--quorum_tick_ms", "20"]
    options += ["--heartbeat_timeout_ms", "1000", "--bind", f"127.0.0.1:{port}"]
    started.append(start([*lighthouse, *options], folder, RUST_LOG="warn"))
    time.sleep(1.0)

    def replica(rank: int) -> None:
        command = [python, str(HERE / "recovery_torchft.py"), str(folder), str(mib), str(rank)]
        where = f"http://127.0.0.1:{port}"
        started.append(start(command, folder, TORCHFT_LIGHTHOUSE=where))

    for rank in range(RANKS):
        replica(rank)
    return Job(folder, lambda: replica(VICTIM))


def _commits_since(notes: list[tuple[str, float]], killed: float) -> float:
    """Return when a rank first committed a step that was not under way at ``killed``.

    It has noted something else before: the next agreement, another size, its own new start.
    """
    changed = False
    for what, at in notes:
        if at > killed and changed and what == "commit":
            return at
        changed |= at > killed and what not in ("commit", f"size {RANKS}")
    return float("inf")


def measure(job: Job, spare: bool) -> tuple[float, float, dict[str, float]]:
    """Return the two times, and the stations of the rank that came."""

    def warm(notes: Notes) -> bool:
        sizes = [sum(what == f"size {RANKS}" for what, _ in notes.get(r, [])) for r in range(RANKS)]
        ready = not spare or any(what == "ready" for what, _ in notes.get(RANKS, []))
        return min(sizes) > 20 and ready

    notes = job.wait(warm)
    pids = [what.split()[1] for what, _ in notes[VICTIM] if what.startswith("pid")]
    killed = time.time()
    os.kill(int(pids[-1]), signal.SIGKILL)
    job.again()

    def whole(notes: Notes) -> bool:
        new = notes.get(RANKS) or [one for one in notes[VICTIM] if one[1] > killed + 0.01]
        return any(what == f"size {RANKS}" for what, _ in new)

    notes = job.wait(whole)
    new = notes.get(RANKS) or [one for one in notes[VICTIM] if one[1] > killed + 0.01]
    after = min(_commits_since(own, killed) for own in notes.values())
    again = next(at for what, at in new if what == f"size {RANKS}")
    stations: dict[str, float] = {}
    for what, at in new:
        stations.setdefault(what.split()[0], at - killed)
    return after - killed, again - killed, stations


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--torch-python", default="")
    parser.add_argument("--stations", action="store_true")
    given = parser.parse_args()
    ways: dict[str, Callable[[Path, list], Job]] = {
        "meshrun --replace": lambda f, s: meshrun(["--replace", "1"], given.mib, f, s),
        "meshrun --spares": lambda f, s: meshrun(["--spares", "1"], given.mib, f, s),
    }
    if given.torch_python:
        python = given.torch_python
        ways["torchrun --max-restarts"] = lambda f, s: torchrun(python, given.mib, f, s)
        if Path(python).with_name("torchft_lighthouse").exists():
            ways["torchft"] = lambda f, s: torchft(python, given.mib, f, s)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, begin in ways.items():
            with tempfile.TemporaryDirectory() as folder, processes() as started:
                try:
                    job = begin(Path(folder), started)
                    first, all_, stations = measure(job, name.endswith("spares"))
                except TimeoutError as error:
                    words = (Path(folder) / "output").read_text()[-2000:]
                    print(f"{name}: {error}\n{words}", flush=True)
                    continue
            found[name].append((first, all_))
            shown = {what: round(at, 2) for what, at in stations.items()} if given.stations else ""
            print(f"{name}: {first:.2f} s, all {RANKS} {all_:.2f} s {shown}", flush=True)
    print(f"\n| {given.mib} MiB | next commit, s | of all {RANKS}, s |\n|---|---|---|")
    for name, rows in found.items():
        if rows:
            first, all_ = (statistics.median(column) for column in zip(*rows, strict=True))
            print(f"| {name} | {first:.2f} | {all_:.2f} |")


if __name__ == "__main__":
    main()
