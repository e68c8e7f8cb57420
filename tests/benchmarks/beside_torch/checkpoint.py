"""Saving and loading 256 MiB on 2 ranks, beside torch's DCP, in one interleaved run.

    python tests/benchmarks/beside_torch/checkpoint.py [MiB] [rounds] [--no-sync] [--folder DIR]

It starts its own ranks: two processes, each of which has both libraries (torch with DTensor on
Gloo, and meshlib). Both save the same float32 arrays, sharded by rows over both ranks, and load
them on a mesh of two sharded by columns: another mesh. ``--no-sync`` has both leave it to the
system when the disk gets the bytes. ``np.save`` of half the bytes on each rank, without checksums,
is what the file system takes; ``copy`` is that of a rank's half, for what ``async_save`` stops.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np

ARRAYS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mib", nargs="?", type=int, default=256)
    parser.add_argument("rounds", nargs="?", type=int, default=9)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given)
        return
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "meshlib._launcher", "--nproc-per-node", "2"]
    subprocess.run([*command, __file__, *sys.argv[1:]], env=environment, check=True)


def rank(given: argparse.Namespace) -> None:
    import torch
    import torch.distributed as c10d
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import meshlib as dist
    from meshlib.checkpoint import Checkpointer, load
    from transport._native import core

    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    me = dist.get_rank()
    where = [tempfile.mkdtemp(prefix="ckpt-bench-", dir=given.folder) if me == 0 else None]
    dist.broadcast_object_list(where)
    folder = Path(where[0])
    c10d.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=me, world_size=2)
    theirs = torch_mesh("cpu", (2,))
    whole_again = {"src_data_rank": None}

    side = 2048
    rows = (given.mib << 20) // 4 // ARRAYS // side
    by_rows, by_columns = dist.Sharding(mesh, dist.P("dp")), dist.Sharding(mesh, dist.P(None, "dp"))
    rng = np.random.default_rng(0)
    whole = [rng.random((rows, side), np.float32) for _ in range(ARRAYS)]
    ours = {
        f"w{i}": dist.distribute_array(x, by_rows, src_data_rank=None) for i, x in enumerate(whole)
    }
    tensors = {
        f"w{i}": distribute_tensor(torch.from_numpy(x), theirs, [Shard(0)], **whole_again)
        for i, x in enumerate(whole)
    }
    halves = np.stack([x.to_local() for x in ours.values()])
    room = np.empty_like(halves)
    columns = dict.fromkeys(ours, by_columns)
    del whole

    sync = not given.no_sync
    checkpointer = Checkpointer(folder / "ours", sync=sync)
    step = 0

    def save() -> None:
        nonlocal step
        step += 1
        checkpointer.save(ours, step=step)

    dcp_folder = folder / "dcp"

    def dcp_save() -> None:
        nonlocal dcp_folder
        dcp_folder = folder / f"dcp-{step}"
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(dcp_folder, sync_files=sync))

    def np_save() -> None:
        np.save(folder / f"plain{me}.npy", halves)
        dist.barrier()

    def start() -> None:
        nonlocal step
        step += 1
        checkpointer.async_save(ours, step=step)

    def dcp_load() -> None:
        target = {
            name: distribute_tensor(torch.empty(rows, side), theirs, [Shard(1)], **whole_again)
            for name in tensors
        }
        begin = perf_counter()
        dcp.load(target, checkpoint_id=dcp_folder)
        loaded["dcp"] = target
        times_inside.append(perf_counter() - begin)

    times_inside: list[float] = []
    loaded = {}
    ways = {
        "np.save of each half": np_save,
        "DCP save": dcp_save,
        "save": save,
        "copy of a half": lambda: np.copyto(room, halves),
        "async_save, what stops": start,
        "load by columns": lambda: loaded.update(ours=load(folder / "ours", columns)),
        "load by columns, verify=False": lambda: load(folder / "ours", columns, verify=False),
        "DCP load by columns": dcp_load,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(given.rounds + 1):
        for name, way in ways.items():
            dist.barrier()
            begin = perf_counter()
            way()
            took = times_inside.pop() if times_inside else perf_counter() - begin
            checkpointer.wait()
            if me == 0:  # not timed: both write new files, and what is gone never gets to the disk
                for old in (folder / "ours").glob("step-*"):
                    if old.name != f"step-{step}":
                        shutil.rmtree(old)
            dist.barrier()
            if number:
                times[name].append(took)
        for name, x in loaded["ours"].items():
            np.testing.assert_array_equal(x.to_local(), loaded["dcp"][name].to_local().numpy())
        loaded.clear()
        if me == 0:
            shutil.rmtree(dcp_folder)
    checkpointer.close()
    medians = np.array([statistics.median(one) for one in times.values()])
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    if me == 0:
        by_name = dict(zip(ways, medians, strict=True))
        core_is = "with" if core else "without"
        print(f"{given.mib} MiB on 2 ranks, {core_is} the core, sync {sync}, {given.rounds} rounds")
        for name, seconds in by_name.items():
            print(f"  {name:32} {1e3 * seconds:7.1f} ms")
        for ours_is, other in [
            ("save", "DCP save"),
            ("save", "np.save of each half"),
            ("async_save, what stops", "copy of a half"),
            ("load by columns", "DCP load by columns"),
            ("load by columns, verify=False", "DCP load by columns"),
        ]:
            print(f"  {ours_is} / {other}: {by_name[ours_is] / by_name[other]:.2f}")
        shutil.rmtree(folder)
    dist.barrier()
    c10d.destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
