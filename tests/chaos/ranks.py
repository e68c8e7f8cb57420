"""One rank of a faulted run: a process that notes when it raised, and what."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import meshlib as dist
from transport import _environment as environment


def run_rank(variables: dict[str, str], fault: int, victim: int, backend: str, folder: str) -> None:
    """Join the job that ``variables`` describe and take part in fault number ``fault``."""
    from faults import faults  # beside this file; the processes are given the folder's path

    os.environ.update(variables)
    rank, size = int(variables[environment.RANK]), int(variables[environment.WORLD_SIZE])
    # What the ranks print belongs to nobody.
    log = os.open(os.path.join(folder, f"output{rank}"), os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    chosen = faults(victim, size)[fault]
    notes: dict[str, Any] = {"rank": rank}
    dist.init_process_group(backend, timeout=chosen.deadline)
    try:
        group = dist.group.WORLD
        for _ in range(3):
            group.barrier()
        note(folder, f"begun{rank}", {"time": time.monotonic()})
        (chosen.victim if rank == victim else chosen.others)(group)
        notes["raised"] = None
    except dist.DistError as error:
        notes |= {"raised": type(error).__name__, "text": str(error), "time": time.monotonic()}
        note(folder, f"raised{rank}", notes)
        # Everybody must have been told before anybody goes: an exit would be a fault of its own.
        await_file(folder, "end", 60.0)
    except BaseException:  # noqa: BLE001 (the process ends with it)
        traceback.print_exc()
        dist.destroy_process_group()
        sys.exit(1)
    dist.destroy_process_group()


def note(folder: str, name: str, what: dict[str, Any]) -> None:
    """Write ``what`` to the file ``name``, which appears whole."""
    part = Path(folder, f"{name}.part")
    part.write_text(json.dumps(what))
    part.replace(Path(folder, name))


def await_file(folder: str, name: str, seconds: float) -> bool:
    """Wait until the file ``name`` is there; return whether it came within ``seconds``."""
    end = time.monotonic() + seconds
    while not Path(folder, name).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
