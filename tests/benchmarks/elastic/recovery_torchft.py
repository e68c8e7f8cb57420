"""A replica of ``recovery`` under torchft: the same steps, its manager's all-reduce on Gloo.

TORCHFT_LIGHTHOUSE=http://... python tests/benchmarks/elastic/recovery_torchft.py OUT MIB RANK
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

BEGUN = time.time()
import torch  # noqa: E402 (how long it takes is measured)
import torchft  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

IMPORTED = time.time()


def main(out: Path, mib: int, rank: int) -> None:
    """Commit steps until it is killed."""
    torch.set_num_threads(1)
    with (out / f"rank-{rank}.jsonl").open("a", buffering=1) as file:

        def note(what: str, at: float | None = None) -> None:
            file.write(json.dumps([what, time.time() if at is None else at]) + "\n")

        note(f"pid {os.getpid()}", BEGUN)
        note("imported", IMPORTED)
        state = {"weights": torch.full((mib << 17,), float(rank), dtype=torch.float64)}
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
            min_replica_size=1,
            load_state_dict=state.update,
            state_dict=lambda: dict(state),
            replica_id=f"replica-{rank}",
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=10),
        )
        note("joined")
        gradient = torch.zeros(1024)
        while True:
            manager.start_quorum()
            time.sleep(0.005)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                note("commit")
                note(f"size {manager.num_participants()}")


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
