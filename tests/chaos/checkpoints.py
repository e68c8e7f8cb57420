"""kill -9 while checkpoints are written: the newest complete one always loads.

    python tests/chaos/checkpoints.py [--runs 200] [--seed 0] [--ranks 2]

Each run starts ranks that save one step after the other, kills one of them (or all at once) at a
random moment, and looks at what is in the folder: the newest checkpoint loads, on another number of
ranks too, all its arrays are those of its step, it is no older than the last that any rank was told
is complete, and a job that goes on in the same folder saves, and leaves nothing unfinished behind.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from transport import _environment as environment
from transport._store.tcp.server import TCPStoreServer

ROWS = 37  # uneven on any number of ranks
BEGIN_SECONDS = 60.0


def rank_program(folder: Path, rank: int, size: int, seed: int, port: int) -> None:
    """Save steps without end, in the background and not, and note what was complete."""
    import meshlib as dist
    from meshlib.checkpoint import Checkpointer
    from meshlib.sharding import P, Sharding, full

    os.environ.update(
        {
            environment.RANK: str(rank),
            environment.WORLD_SIZE: str(size),
            environment.MASTER_ADDR: "127.0.0.1",
            environment.MASTER_PORT: str(port),
            environment.AGENT_STORE: f"127.0.0.1:{port}",
        }
    )
    dist.init_process_group(timeout=30)
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    chance = random.Random(seed)  # the same on all ranks
    told = (folder / f"told-{rank}").open("a")
    with Checkpointer(folder / "run", keep_last=2, sync=False) as checkpoints:
        step = (checkpoints.latest() or 0) + 1
        while True:
            state = {
                "step": step,
                "split": full((ROWS, 9000), Sharding(mesh, P("dp")), float(step)),
                "whole": full((ROWS, 9000), Sharding(mesh), float(step)),
                "few": [np.full(3, float(step)) for _ in range(5)],
            }
            again = chance.random() < 0.2
            for _ in range(2 if again else 1):  # a step that is there already, too
                if chance.random() < 0.5:
                    checkpoints.save(state, step=step)
                else:
                    checkpoints.async_save(state, step=step)
                    checkpoints.wait()
            told.write(f"{step}\n")
            told.flush()
            step += 1


def check(folder: Path, least: int) -> int:
    """Return the step of the newest checkpoint, after looking at all of it."""
    from meshlib.checkpoint import load

    state = load(folder)
    step = state["step"]
    assert step >= least, f"step {least} was complete, but the newest is {step}"
    for array in (state["split"], state["whole"], *state["few"]):
        np.testing.assert_array_equal(array, float(step))
    assert state["split"].shape == (ROWS, 9000)
    return step


def run_once(folder: Path, seed: int, size: int = 2) -> str:
    """Start ranks, kill, check, go on, check; return who was killed and at which step."""
    chance = random.Random(seed)
    victims = [*range(size)] if chance.random() < 0.3 else [chance.randrange(size)]
    with Ranks(folder, size, seed) as ranks:
        ranks.wait_for(folder, 1)
        time.sleep(chance.random() * 0.5)
        for victim in victims:
            ranks.kill(victim)
        ranks.join()
    step = check(folder / "run", last_told(folder))
    # The job goes on, on one rank more, from there; then it ends as badly.
    with Ranks(folder, size + 1, seed + 1_000_000) as ranks:
        ranks.wait_for(folder, step + 1)
    check(folder / "run", step + 1)
    unfinished = [
        path.name for path in (folder / "run").iterdir() if not (path / "zarr.json").exists()
    ]
    assert len(unfinished) <= 1, unfinished  # what was under way at the end
    return f"rank {victims[0]}" if len(victims) == 1 else "all ranks"


class Ranks:
    """Processes that are ranks, without a launcher that would end the others; they share a store.

    They are forked from a server that has the imports, so that a run takes a fraction of a second.
    """

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        self._server = TCPStoreServer("127.0.0.1", 0)
        context = multiprocessing.get_context("forkserver")
        arguments = [(folder, rank, size, seed, self._server.port) for rank in range(size)]
        self.processes = [context.Process(target=run_rank, args=one) for one in arguments]
        for process in self.processes:
            process.start()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._server.close()

    def kill(self, rank: int) -> None:
        """End a rank as nothing can notice."""
        self.processes[rank].kill()

    def join(self) -> None:
        """Wait until all have ended, which none does in good order."""
        for rank, process in enumerate(self.processes):
            process.join(BEGIN_SECONDS)
            assert process.exitcode, f"rank {rank} ended with {process.exitcode}"

    def wait_for(self, folder: Path, step: int) -> None:
        """Wait until a checkpoint is complete, or fail with what a rank said that ended."""
        end_at = time.monotonic() + BEGIN_SECONDS
        while last_told(folder) < step:
            for rank, process in enumerate(self.processes):
                if process.exitcode is not None:
                    raise RuntimeError((folder / f"errors-{rank}").read_text()[-2000:])
            if time.monotonic() > end_at:
                raise RuntimeError(f"step {step} was not complete after {BEGIN_SECONDS:g} s")
            time.sleep(0.005)


def run_rank(folder: Path, rank: int, *arguments: int) -> None:
    """Be a rank; what it says goes to a file."""
    errors = os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    rank_program(folder, rank, *arguments)


def last_told(folder: Path) -> int:
    """Return the last step of which any rank was told that it is complete."""
    steps = [path.read_text().split() for path in folder.glob("told-*")]
    return max((int(step) for one in steps for step in one), default=0)


def main() -> int:
    """Run what was asked for; return 1 if a run was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    multiprocessing.set_forkserver_preload(["meshlib._job.starting.init", "meshlib.checkpoint"])
    good: collections.Counter[str] = collections.Counter()
    bad = 0
    for seed in range(given.seed, given.seed + given.runs):
        with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
            try:
                good[run_once(Path(folder), seed, given.ranks)] += 1
            except Exception as error:  # noqa: BLE001 (told, and the next run follows)
                bad += 1
                print(f"run {seed}: {type(error).__name__}: {error}", flush=True)
    counts = ", ".join(f"{who} killed {count} times" for who, count in sorted(good.items()))
    print(f"{given.runs} runs, {bad} wrong; {counts}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
