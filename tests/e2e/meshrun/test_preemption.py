"""A job that is told to end: all ranks save after the same step, and it is resumed there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

PROGRAM = (PROGRAMS / "preempted.py").read_text()
RESUME = os.EX_TEMPFAIL


def pid_of(meshrun, rank):
    """Return the process of a rank that listens to signals."""
    path = meshrun.folder / f"pid-{rank}"
    assert meshrun.wait_for(path.exists)
    return int(path.read_text())


def stopped_at(*outputs, ranks):
    """Return the step after which all ranks have stopped."""
    lines = "".join(outputs).split("\n")[:-1]
    assert len(lines) == ranks
    assert len(set(lines)) == 1
    assert lines[0].startswith("stopped ")
    return int(lines[0].removeprefix("stopped "))


def last_saved(meshrun):
    (saved,) = (meshrun.folder / "checkpoints").iterdir()
    return int(saved.name.removeprefix("step-"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_to_one_rank_stops_all_at_the_same_step(meshrun, number):
    job = meshrun.start("-n3", meshrun.script(PROGRAM))
    pids = [pid_of(meshrun, rank) for rank in range(3)]
    os.kill(pids[1], number)
    result = meshrun.finish(job)
    assert result.code == RESUME, result.err
    assert result.err == "meshrun: ranks 0-2 ended with exit code 75, to be resumed\n"
    assert stopped_at(result.out, ranks=3) == last_saved(meshrun)


def test_the_launcher_starts_the_ranks_again(meshrun):
    job = meshrun.start("-n2", "--max-restarts=1", meshrun.script(PROGRAM))
    os.kill(pid_of(meshrun, 1), signal.SIGUSR1)
    result = meshrun.finish(job)
    assert result.code == 0, result.err
    assert "exit code 75; restarting all ranks" in result.err
    lines = result.out.splitlines()
    step = stopped_at(*(f"{line}\n" for line in lines[:2]), ranks=2)
    assert lines[2:] == [f"went on from {step + 1}"] * 2


def test_the_launcher_s_sigterm_is_answered_by_saving(meshrun):
    job = meshrun.start("-n2", meshrun.script(PROGRAM))
    for rank in range(2):
        pid_of(meshrun, rank)
    job.send_signal(signal.SIGTERM)
    result = meshrun.finish(job)
    assert result.code == RESUME
    assert (
        result.err
        == "meshrun: received SIGTERM; ranks 0-1 ended with exit code 75, to be resumed\n"
    )
    assert stopped_at(result.out, ranks=2) == last_saved(meshrun)


def test_all_nodes_have_time_to_save_when_one_is_told_to_end(meshrun, free_port):
    """Saving takes longer here than ranks get after a failure elsewhere."""
    where = ("--nnodes=2", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--nproc-per-node=1")
    script = meshrun.script(PROGRAM)
    nodes = [
        meshrun.start(*where, f"--node-rank={node}", script, env={"SLOW": "5"}) for node in (0, 1)
    ]
    for rank in range(2):
        pid_of(meshrun, rank)
    nodes[1].send_signal(signal.SIGTERM)
    results = [meshrun.finish(node) for node in nodes]
    assert [result.code for result in results] == [RESUME, RESUME], results
    step = stopped_at(*(result.out for result in results), ranks=2)
    assert step == last_saved(meshrun)
