"""A rank of ``recovery``: short steps of a loop with some state, and when what has happened.

meshrun -n 4 --replace 1 tests/benchmarks/elastic/recovery_program.py OUT MIB STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

BEGUN = time.time()
import numpy as np  # noqa: E402 (how long it takes is measured)

import meshlib as dist  # noqa: E402
from parallel.elastic import ElasticMesh  # noqa: E402
from parallel.elastic import _mesh as elastic_module  # noqa: E402

IMPORTED = time.time()


def main(out: Path, mib: int, until: int) -> None:
    """Commit ``until`` steps."""
    rank = int(os.environ["RANK"])
    with (out / f"rank-{rank}.jsonl").open("a", buffering=1) as file:

        def note(what: str, at: float | None = None) -> None:
            file.write(json.dumps([what, time.time() if at is None else at]) + "\n")

        def around(name: str, what: str) -> None:
            function = getattr(elastic_module, name)

            def noted(*args, **kwargs):
                result = function(*args, **kwargs)
                note(what)
                return result

            setattr(elastic_module, name, noted)

        note(f"pid {os.getpid()}", BEGUN)
        note("imported", IMPORTED)
        around("agree_on_epoch", "agreed")
        around("await_call", "called")
        around("enter", "entered")
        around("transfer", "transferred")
        dist.init_process_group(timeout=60)
        note("joined")
        mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
        state = {"weights": np.full(mib << 17, float(rank)), "gradient": np.zeros(1024)}
        with ElasticMesh(mesh, "dp", timeout=10, join_timeout=60) as elastic:
            note("ready")
            for step in elastic.steps(state, until):
                with step as current:
                    time.sleep(0.005)
                    current.all_reduce(state["gradient"])
                    step.on_commit(note, "commit")
                    size = current.size()
                if step.committed:
                    note(f"size {size}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
