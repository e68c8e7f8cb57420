"""The same kinds of fault on torch.distributed with Gloo, to read beside ``run.py``'s table.

    python -m tests.benchmarks.setup_peers            # makes .bench/torch, once
    .bench/torch/bin/python tests/chaos/torch_gloo.py --ranks 3

Needs torch and nothing of this project. The groups' timeout is 5 seconds here instead of torch's
30 minutes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 5.0
GIVE_UP = 12.0

Program = Callable[[], Any]


def small() -> torch.Tensor:
    """The call that all ranks should make; returns what came of it."""
    x = torch.ones(4)
    dist.all_reduce(x)
    return x


def wrong_dtype() -> torch.Tensor:
    """Reduce another dtype than the others."""
    x = torch.ones(4, dtype=torch.int32)
    dist.all_reduce(x)
    return x


def wrong_op() -> torch.Tensor:
    """Reduce with another op than the others."""
    x = torch.ones(4)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


def wrong_count() -> torch.Tensor:
    """Reduce more elements than the others."""
    x = torch.ones(5)
    dist.all_reduce(x)
    return x


def wrong_kind() -> torch.Tensor:
    """Broadcast while the others reduce."""
    x = torch.ones(4)
    dist.broadcast(x, src=0)
    return x


def killed() -> None:
    """Die without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    """Stand still."""
    os.kill(os.getpid(), signal.SIGSTOP)


def absent() -> None:
    """Do something else."""
    time.sleep(TIMEOUT + 3)


FAULTS: dict[str, Program] = {
    "mismatch: dtype": wrong_dtype,
    "mismatch: op": wrong_op,
    "mismatch: count": wrong_count,
    "mismatch: kind": wrong_kind,
    "killed": killed,
    "stopped": stopped,
    "absent": absent,
}


def run_rank(rank: int, size: int, port: int, fault: str, victim: int, folder: str) -> None:
    """Take part in one fault and note how it ended."""
    log = os.open(os.path.join(folder, f"output{rank}"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    for _ in range(3):
        dist.barrier()
    note(folder, f"begun{rank}", {"time": time.monotonic()})
    try:
        value = FAULTS[fault]() if rank == victim else small()
        ending = {"text": "", "value": None if value is None else value.tolist()}
    except RuntimeError as error:
        ending = {"text": str(error), "value": None}
    note(folder, f"ended{rank}", {**ending, "time": time.monotonic()})
    time.sleep(2 * GIVE_UP)  # nobody goes before everybody has been seen


def note(folder: str, name: str, what: dict[str, Any]) -> None:
    """Write ``what`` to the file ``name``, which appears whole."""
    part = Path(folder, f"{name}.part")
    part.write_text(json.dumps(what))
    part.replace(Path(folder, name))


def run_fault(fault: str, size: int) -> str:
    """Run one fault; return in words what the ranks did."""
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    victim = 1
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        processes = [
            context.Process(target=run_rank, args=(r, size, port, fault, victim, folder))
            for r in range(size)
        ]
        for process in processes:
            process.start()
        others = [rank for rank in range(size) if rank != victim]
        begun = Path(folder, f"begun{victim}")
        end = time.monotonic() + 60.0
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.01)
        end = time.monotonic() + GIVE_UP
        while time.monotonic() < end:
            if all(Path(folder, f"ended{r}").exists() or died(processes[r]) for r in others):
                break
            time.sleep(0.01)
        words = describe(folder, others, victim, [died(processes[r]) for r in others])
        for process in processes:
            process.kill()
            process.join()
    return words


def died(process: Any) -> bool:
    """True if a process has ended by a signal."""
    return process.exitcode is not None and process.exitcode < 0


def describe(folder: str, others: list[int], victim: int, aborted: list[bool]) -> str:
    """Return what the other ranks did, how soon, and whether they name the victim."""
    begun = Path(folder, f"begun{victim}")
    if not begun.exists():
        return "did not begin"
    start = json.loads(begun.read_text())["time"]
    parts: list[str] = []
    for rank, dead in zip(others, aborted, strict=True):
        path = Path(folder, f"ended{rank}")
        if path.exists():
            ending = json.loads(path.read_text())
            seconds = ending["time"] - start
            if ending["text"]:
                named = "names" if f"rank {victim}" in ending["text"].lower() else "does not name"
                parts.append(f"raised after {seconds:.2f} s, {named} the rank")
            else:
                parts.append(f"returned {ending['value']}, no error")
        else:
            parts.append("process aborted" if dead else f"hung for {GIVE_UP:g} s")
    return "; ".join(dict.fromkeys(parts))


def main() -> int:
    """Print a table of faults."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=3)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    print(f"| fault | torch {torch.__version__}, Gloo, {options.ranks} ranks |\n|---|---|")
    for fault in FAULTS:
        print(f"| {fault} | {run_fault(fault, options.ranks)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
