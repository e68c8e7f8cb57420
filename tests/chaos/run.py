"""Runs each fault against each transport and checks what the ranks say and what is left.

    make chaos              # everything: over 500 runs; writes out/reliability-table.md
    python tests/chaos/run.py --transports tcp --ranks 3 --faults kill

With ``--results FILE`` each outcome is written there as soon as it is known, and ``--table`` shows
all that the file has: a run that was interrupted leaves its part, and ``--append`` adds to it::

    python tests/chaos/run.py --transports tcp --results out/chaos.jsonl --table out/chaos.md
    python tests/chaos/run.py --transports shm --results out/chaos.jsonl --append

The ranks are processes without a launcher: nobody but the library tells them anything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from faults import Fault, faults  # noqa: E402 (beside this file)
from ranks import run_rank  # noqa: E402

from transport import _environment as environment  # noqa: E402
from transport._store.tcp.server import TCPStoreServer  # noqa: E402

GIVE_UP = 15.0
MARK = "MESHLIB_CHAOS"


@dataclass(frozen=True)
class Outcome:
    """The result of one run: ``problems`` is empty if it went as it must."""

    fault: str
    transport: str
    ranks: int
    seconds: float
    problems: tuple[str, ...]


def run_fault(transport: str, size: int, number: int, victim: int, slack: float = 0.0) -> Outcome:
    """Run one fault and return its outcome; ``slack`` is in seconds, beyond the fault's limit."""
    fault = faults(victim, size)[number]
    before = left_behind()
    secret = secrets.token_hex(16)
    context = multiprocessing.get_context("forkserver")
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        server = TCPStoreServer("127.0.0.1", 0, secret=bytes.fromhex(secret))
        processes = [
            context.Process(
                target=run_rank,
                args=(
                    variables(rank, size, server.port, secret, mark),
                    number,
                    victim,
                    transport,
                    folder,
                ),
                daemon=True,
            )
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            seconds, problems = judge(fault, size, victim, folder, slack)
            Path(folder, "end").touch()
            for rank, process in enumerate(processes):
                if rank == victim and process.pid is not None and process.is_alive():
                    # The server that forked it collects it at its own time.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGCONT)
                process.join(8.0)
                if process.is_alive():
                    problems.append(f"rank {rank} did not end")
                    process.kill()
                    process.join()
                process.close()
        finally:
            server.close()
    problems += [f"left behind: {thing}" for thing in remains(before, slack)]
    return Outcome(fault.name, transport, size, seconds, tuple(problems))


def variables(rank: int, size: int, port: int, secret: str, mark: str) -> dict[str, str]:
    """Return what a launcher would put into the environment of ``rank``."""
    return {
        environment.RANK: str(rank),
        environment.WORLD_SIZE: str(size),
        environment.LOCAL_RANK: str(rank),
        environment.LOCAL_WORLD_SIZE: str(size),
        environment.MASTER_ADDR: "127.0.0.1",
        environment.MASTER_PORT: str(port),
        environment.AGENT_STORE: f"127.0.0.1:{port}",
        environment.SECRET: secret,
        MARK: mark,
    }


def judge(
    fault: Fault, size: int, victim: int, folder: str, slack: float = 0.0
) -> tuple[float, list[str]]:
    """Wait for what the ranks note; return the seconds to the last raise, and what is wrong."""
    raising = [rank for rank in range(size) if rank != victim or fault.victim_raises]
    end = time.monotonic() + GIVE_UP + slack
    while time.monotonic() < end:
        if all(Path(folder, f"raised{rank}").exists() for rank in raising):
            break
        time.sleep(0.005)
    problems: list[str] = []
    notes: dict[int, dict[str, Any]] = {}
    for rank in raising:
        path = Path(folder, f"raised{rank}")
        if path.exists():
            notes[rank] = json.loads(path.read_text())
        else:
            tail = Path(folder, f"output{rank}")
            output = tail.read_text()[-300:] if tail.exists() else ""
            problems.append(f"rank {rank} raised nothing in {GIVE_UP:g} s {output!r}")
    for rank, note in notes.items():
        if note["raised"] != fault.error.__name__:
            problems.append(f"rank {rank} raised {note['raised']}: {note['text'][:200]}")
        elif not names(fault, note["text"], victim, size):
            problems.append(f"rank {rank} does not name rank {victim}: {note['text'][:300]}")
    begun = Path(folder, f"begun{victim}")
    if not notes or not begun.exists():
        return GIVE_UP, problems or ["the run did not begin"]
    start = json.loads(begun.read_text())["time"]
    seconds = max(note["time"] for note in notes.values()) - start
    if seconds > fault.limit + slack + (0.15 if "large" in fault.name else 0.0):
        problems.append(f"the last rank raised after {seconds:.2f} s, not {fault.limit:g} s")
    return seconds, problems


def names(fault: Fault, text: str, victim: int, size: int) -> bool:
    """True if ``text`` says who is to blame: by name, or with each rank's call in a table."""
    if not fault.name.startswith("mismatch"):
        return f"rank {victim} " in text
    rows = [line.split() for line in text.splitlines()]
    listed = {int(row[0]) for row in rows if row and row[0].isdigit() and "call" in row}
    return listed == set(range(size))


def left_behind() -> set[str]:
    """Return what of ours is on this machine outside of any process."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    temporary = tempfile.gettempdir()
    found |= {
        f"{temporary}/{name}"
        for name in os.listdir(temporary)
        if "meshlib" in name or name.startswith("chaos-")
    }
    with open("/proc/net/unix") as sockets:
        found |= {line.split()[-1] for line in sockets if "meshlib" in line}
    return found


def remains(before: set[str], slack: float) -> list[str]:
    """Return what is there now and was not ``before``; what goes within ``slack`` seconds is of
    others that run beside this.
    """
    end = time.monotonic() + slack
    left = left_behind() - before
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left &= left_behind()
    return sorted(left)


def select(options: argparse.Namespace) -> Iterator[tuple[str, int, int, int]]:
    """Yield (transport, ranks, fault number, victim) for each run that was asked for."""
    for repetition in range(options.repeat):
        for transport in options.transports.split(","):
            for size in map(int, options.ranks.split(",")):
                victim = (1 + repetition) % size
                for number, fault in enumerate(faults(victim, size)):
                    if options.faults in fault.name:
                        yield transport, size, number, victim


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a Markdown table: a row a fault, a column a transport and size."""
    columns = sorted({(o.transport, o.ranks) for o in outcomes})
    if not outcomes:
        return "(no runs)"
    lines = [
        "| fault | " + " | ".join(f"{t}, {n} ranks" for t, n in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for name in dict.fromkeys(o.fault for o in outcomes):
        cells: list[str] = []
        for column in columns:
            mine = [o for o in outcomes if o.fault == name and (o.transport, o.ranks) == column]
            if not mine:
                cells.append("")
                continue
            good = sum(not o.problems for o in mine)
            slowest = max(o.seconds for o in mine)
            middle = statistics.median(o.seconds for o in mine)
            cells.append(f"{good}/{len(mine)}, {middle:.2f} s (max {slowest:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Results:
    """The outcomes so far, kept in a file of JSON lines and shown as a table in another."""

    def __init__(self, file: Path | None, table_file: Path | None, *, append: bool) -> None:
        self._file = file
        self._table_file = table_file
        self.outcomes: list[Outcome] = []
        for path in (file, table_file):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if file is not None and append and file.exists():
            for line in file.read_text().splitlines():
                kept = json.loads(line)
                self.outcomes.append(Outcome(**{**kept, "problems": tuple(kept["problems"])}))
        elif file is not None:
            file.write_text("")

    def add(self, outcome: Outcome) -> None:
        """Keep ``outcome``, and show it."""
        self.outcomes.append(outcome)
        if self._file is not None:
            with self._file.open("a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
        if self._table_file is not None:
            self._table_file.write_text(self.describe() + "\n")

    def describe(self) -> str:
        """Return the table and, in a sentence, how many runs were as they must be."""
        good = sum(not o.problems for o in self.outcomes)
        return (
            f"{len(self.outcomes)} faulted runs, {good} named and clean\n\n{table(self.outcomes)}"
        )


def main() -> int:
    """Run what was asked for; return 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transports", default="tcp")
    parser.add_argument("--ranks", default="2,3,5")
    parser.add_argument("--faults", default="", help="only those whose name contains this")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--slack", type=float, default=0.0, help="seconds allowed beyond limits (a busy machine)"
    )
    parser.add_argument("--results", type=Path, help="write outcomes into this file, one a line")
    parser.add_argument("--append", action="store_true", help="keep what --results has already")
    parser.add_argument("--table", type=Path, help="write the table of all results into this file")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["meshlib", "faults", "ranks"])
    before = left_behind()
    runs = list(select(options))
    results = Results(options.results, options.table, append=options.append)
    bad = 0
    begin = time.monotonic()
    for i, (transport, size, number, victim) in enumerate(runs, 1):
        outcome = run_fault(transport, size, number, victim, options.slack)
        results.add(outcome)
        bad += bool(outcome.problems)
        state = "ok" if not outcome.problems else "WRONG: " + "; ".join(outcome.problems)
        print(
            f"{i}/{len(runs)} {transport} {size} ranks, {outcome.fault}: "
            f"{outcome.seconds:.2f} s {state}",
            flush=True,
        )
    print(f"{time.monotonic() - begin:.0f} s for {len(runs)} runs")
    print(results.describe())
    left = remains(before, options.slack)
    print(f"left behind by all of them: {', '.join(left) or 'nothing'}")
    return 1 if bad or left or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
