"""A rank of ``recovery`` under ``torchrun --max-restarts``: the same steps on Gloo.

A new start reads a checkpoint of MIB, as it would; here it is a file in memory or the page cache.

    torchrun --nproc-per-node 4 --max-restarts 1 tests/benchmarks/elastic/recovery_torch.py OUT MIB
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

BEGUN = time.time()
import torch  # noqa: E402 (how long it takes is measured)
import torch.distributed as dist  # noqa: E402

IMPORTED = time.time()


def main(out: Path, mib: int) -> None:
    """Commit steps until it is killed."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    saved = out / "saved.pt"
    with (out / f"rank-{rank}.jsonl").open("a", buffering=1) as file:

        def note(what: str, at: float | None = None) -> None:
            file.write(json.dumps([what, time.time() if at is None else at]) + "\n")

        note(f"pid {os.getpid()}", BEGUN)
        note("imported", IMPORTED)
        dist.init_process_group("gloo")
        note("joined")
        again = saved.exists()
        dist.barrier()
        if again:
            torch.load(saved)
        elif rank == 0:
            torch.save(torch.full((mib << 17,), 1.0, dtype=torch.float64), saved)
        dist.barrier()
        gradient = torch.zeros(1024)
        while True:
            time.sleep(0.005)
            dist.all_reduce(gradient)
            note("commit")
            note(f"size {dist.get_world_size()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
