"""The launcher under engines, played by their variables and signals, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

STEP = {
    **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"},
    **{"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
    **{"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_JOB_NUM_NODES": "1"},
}
COUNTS = """
    import os, signal, time

    counts = {}
    def told(number, frame):
        counts[number] = counts.get(number, 0) + 1
    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGUSR1, told)
    open(f"ready{os.environ['RANK']}", "w").close()
    until = time.monotonic() + 60
    while signal.SIGTERM not in counts and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(1)
    print(counts.get(signal.SIGUSR1, 0), counts.get(signal.SIGTERM, 0), flush=True)
"""
HELLO = """
    import meshlib as dist
    dist.init_process_group(timeout=30)
    print(dist.get_rank(), dist.get_world_size())
"""


def ranks_of(meshrun):
    """The processes that have a rank's variables."""
    found = []
    for pid in meshrun.processes():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(item.startswith(b"LOCAL_RANK=") for item in variables):
            found.append(pid)
    return found


def test_slurms_signals_reach_each_rank_once(meshrun):
    """Slurm sends them to every process of a step: what the launcher adds comes twice."""
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--start", "exec")
    job = meshrun.start(*flags, meshrun.script(COUNTS), env=STEP)
    for rank in range(2):
        assert meshrun.wait_for((meshrun.folder / f"ready{rank}").exists)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        for pid in [job.pid, *ranks_of(meshrun)]:
            os.kill(pid, number)
    result = meshrun.finish(job)
    assert result.out.splitlines() == ["1 1", "1 1"]
    assert (result.code, result.err) == (143, "meshrun: received SIGTERM; ended ranks 0-1\n")


def test_ranks_that_slurm_ends_first_have_not_failed(meshrun):
    """Nothing is restarted, and no rank blamed, when a rank ends before the launcher is told."""
    script = meshrun.script("""
        import os, time
        open(f"ready{os.environ['RANK']}", "w").close()
        time.sleep(600)
    """)
    flags = ("--nproc-per-node", "2", "--max-restarts", "3", "--start", "exec")
    job = meshrun.start(*flags, script, env=STEP | meshrun.long_windows())
    for rank in range(2):
        assert meshrun.wait_for((meshrun.folder / f"ready{rank}").exists)
    for pid in [*ranks_of(meshrun), job.pid]:
        os.kill(pid, signal.SIGTERM)
    result = meshrun.finish(job)
    assert (result.code, result.err) == (143, "meshrun: received SIGTERM; ended ranks 0-1\n")


@pytest.mark.parametrize("way", ["endpoint", "pods"])
def test_a_name_that_nobody_knows_yet(meshrun, tmp_path, free_port, way):
    """Both nodes failed, since neither took the address for its own at the beginning.

    Pods have numbers (Kubeflow's ``PET_`` variables); at an endpoint they go by arrival.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to have a hosts file of its own")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    inner = f"mount --bind {hosts} /etc/hosts && exec {sys.executable} -m meshlib._launcher"
    command = ("unshare", "-m", "sh", "-c", f'{inner} "$@"', "meshrun")
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"late.test:{free_port}")
    script = meshrun.script(HELLO)
    env = {"MESHLIB_SECRET": "ab" * 32}
    pods = {"PET_NNODES": "2", "PET_MASTER_ADDR": "late.test", "PET_MASTER_PORT": str(free_port)}
    nodes = []
    for node in range(2):
        if way == "pods":
            flags, env = (), env | pods | {"PET_NODE_RANK": str(node)}
        nodes.append(meshrun.start(*flags, script, command=command, env=env))
    waiting = nodes[1].stderr.readline()
    assert "waiting for the leading node, at late.test" in waiting
    with hosts.open("a") as file:
        file.write("127.0.0.1 late.test\n")
    results = [meshrun.finish(node) for node in nodes]
    assert [result.code for result in results] == [0, 0]
    assert sorted(line for result in results for line in result.out.splitlines()) == ["0 2", "1 2"]


def test_a_program_that_is_meant_to_be_alone(meshrun):
    script = meshrun.script(HELLO)
    alone = meshrun.run(script, command=(sys.executable,), env={"MESHLIB_LAUNCHER": "none"})
    assert (alone.code, alone.out) == (0, "0 1\n")
    assert alone.err == (
        "a world of one, requested by MESHLIB_LAUNCHER=none: no other process takes part\n"
    )
    several = meshrun.run("--nproc-per-node=2", script, env={"MESHLIB_LAUNCHER": "none"})
    assert sorted(several.out.splitlines()) == ["0 2", "1 2"]


def test_verbose_says_what_the_engine_said(meshrun):
    env = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}
    result = meshrun.run("-v", meshrun.script(HELLO), env=env)
    assert "meshrun: options from PET_ variables: --nnodes 1 --nproc-per-node 2\n" in result.err
    assert sorted(result.out.splitlines()) == ["0 2", "1 2"]
