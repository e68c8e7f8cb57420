"""The end of a rank in each phase of its life: bounded, quiet, and nothing left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

PROGRAM = (PROGRAMS / "phases.py").read_text()
PHASES = ["init", "collective", "outstanding", "receive"]


def start_and_wait(meshrun, phase):
    process = meshrun.start("--nproc-per-node", "3", meshrun.script(PROGRAM), phase)
    paths = [meshrun.folder / f"ready-{rank}" for rank in range(3)]
    assert meshrun.wait_for(lambda: all(path.exists() for path in paths))
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("phase", PHASES)
def test_signals(meshrun, phase, number):
    process = start_and_wait(meshrun, phase)
    process.send_signal(number)
    result = meshrun.finish(process)
    assert result.code == 128 + number
    assert result.err == f"meshrun: received {number.name}; ended ranks 0-2\n"


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_is_killed(meshrun, phase):
    process = start_and_wait(meshrun, phase)
    os.kill(int((meshrun.folder / "ready-0").read_text()), signal.SIGKILL)
    result = meshrun.finish(process)
    assert result.code == 137
    last = result.err.splitlines()[-1]
    assert last.startswith("meshrun: rank 0 on ")
    assert last.endswith("was killed by SIGKILL")


ENDINGS = {
    "falls off the end": "",
    "destroys": "dist.destroy_process_group()",
    "exits": "sys.exit()",
    "has work outstanding": "dist.all_reduce(x, async_op=True)",
    "has a thread in a call": (
        "import threading; threading.Thread(target=dist.all_reduce, args=(x,)).start()"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_normal_ends(meshrun, ending):
    script = meshrun.script(f"""
        import sys
        import numpy as np
        import meshlib as dist

        dist.init_process_group()
        x = np.ones(8)
        dist.all_reduce(x)
        {ENDINGS[ending]}
    """)
    result = meshrun.run("--nproc-per-node", "3", script)
    assert (result.code, result.out, result.err) == (0, "", "")


@pytest.mark.parametrize("line", ["raise ValueError('all')", "sys.exit(3)", "os._exit(3)"])
def test_all_ranks_fail_at_once(meshrun, line):
    script = meshrun.script(f"""
        import os, sys
        import meshlib as dist
        dist.init_process_group()
        dist.barrier()
        {line}
    """)
    result = meshrun.run("--nproc-per-node", "3", script)
    assert result.code in (1, 3)
    assert result.err.count("Traceback") == ("raise" in line)
