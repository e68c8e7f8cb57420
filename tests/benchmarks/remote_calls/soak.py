"""A million remote calls between two processes: memory, descriptors and threads stay as they are.

    python -m tests.benchmarks.remote_calls.soak [--calls 1000000]

Calls of nothing, of 1 KiB there and back, an object made on the other worker, used and dropped, a
reference passed there and back, and an exception, in this mix, one after the other and in bursts.
Every twentieth part both processes say what they take; the run is good when the last three of these
are no more than the greatest of the second to the fifth, plus 2 MiB and 2 descriptors, there were
never more than 24 threads, and no object is left on its owner.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PARTS = 20
SLACK = {"KiB": 2048, "descriptors": 2}
MOST_THREADS = 24
"""16 that serve, which come and go, and those of the process."""
BURST = 50


class Thing:
    """An object that is made there, used and dropped."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def size(self) -> int:
        """Return something small."""
        return len(self.data)


def nothing() -> None:
    """Do nothing."""


def same(value: Any) -> Any:
    """Return the argument."""
    return value


def fail() -> None:
    """Raise."""
    raise KeyError("as expected")


def taken() -> dict[str, int]:
    """Return what this process takes."""
    from meshlib.rpc._worker import current_worker

    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "KiB": pages * os.sysconf("SC_PAGE_SIZE") >> 10,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(current_worker().references),
    }


def round_of_calls() -> int:
    """Make some calls of each kind; return how many."""
    from meshlib import rpc

    kib = bytes(1024)
    for _ in range(BURST):
        rpc.rpc_sync(1, nothing)
        assert rpc.rpc_sync(1, same, (kib,)) == kib
    futures = [rpc.rpc_async(1, nothing) for _ in range(BURST)]
    futures += [rpc.rpc_async(1, same, (kib,)) for _ in range(BURST)]
    rpc.wait_all(futures)
    thing = rpc.remote(1, Thing, (kib,))
    assert thing.rpc_sync().size() == len(kib)
    assert thing.to_here().data == kib
    back = rpc.rpc_sync(1, same, (thing,))
    assert back.rpc_async().size().wait() == len(kib)
    here = rpc.RRef(kib)
    assert rpc.rpc_sync(1, same, (here,)).local_value() == kib
    try:
        rpc.rpc_sync(1, fail)
    except KeyError:
        pass
    else:
        raise AssertionError("it did not raise")
    return 4 * BURST + 7


def run_worker(rank: int, port: int, calls: int) -> None:
    """Be one of the two; rank 0 calls, and prints what both take after each part."""
    from meshlib import rpc
    from tests.benchmarks.remote_calls import soak as here  # functions travel by name

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        made = 0
        for part in range(PARTS):
            while made < calls * (part + 1) // PARTS:
                made += here.round_of_calls()
            both = [here.taken(), rpc.rpc_sync(1, here.taken)]
            print(json.dumps([made, both]), flush=True)
        until = time.monotonic() + 20
        while any(one["objects"] for one in (here.taken(), rpc.rpc_sync(1, here.taken))):
            if time.monotonic() > until:
                raise AssertionError("objects were not freed")
            time.sleep(0.05)
    rpc.shutdown()


def main() -> int:
    """Run both; 1 if something has grown."""
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*map(int, sys.argv[2:5]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.benchmarks.remote_calls.soak", "--worker"]
    begin, workers = time.monotonic(), list[subprocess.Popen[str]]()
    seen: list[list[dict[str, int]]] = []
    try:
        for rank in (1, 0):
            arguments = [*command, str(rank), str(port), str(given.calls)]
            out = None if rank else subprocess.PIPE
            workers.append(subprocess.Popen(arguments, stdout=out, text=True, env=environment))
        stream = workers[1].stdout
        assert stream is not None
        for line in stream:
            made, both = json.loads(line)
            seen.append(both)
            print(f"{made:8} calls, {time.monotonic() - begin:6.1f} s, {both}", flush=True)
        codes = [worker.wait(60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    grown = [
        f"{name} of worker {rank}: {max(before)} to {max(after)}"
        for rank in (0, 1)
        for name, slack in SLACK.items()
        for before, after in [
            (
                [one[rank][name] for one in seen[1:5]],
                [one[rank][name] for one in seen[-3:]],
            )
        ]
        if max(after) > max(before) + slack
    ]
    most = max(one["threads"] for both in seen for one in both)
    if most > MOST_THREADS:
        grown.append(f"{most} threads")
    print(f"exit codes {codes}; " + ("; ".join(grown) or "nothing has grown"))
    return 1 if grown or any(codes) or len(seen) < PARTS else 0


if __name__ == "__main__":
    sys.exit(main())
