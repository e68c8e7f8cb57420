"""``meshrun --replace`` and ``--spares``: the loss of a rank ends no other, and another comes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

PROGRAM = """
import os, signal, sys
import numpy as np
import meshlib as dist
from parallel import DistributedDataParallel, nn, optim
from parallel.elastic import ElasticBatches, ElasticMesh

signal_name, until = sys.argv[1], 6
dist.init_process_group(timeout=50)
mesh = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
me = int(os.environ["RANK"])
with ElasticMesh(mesh, "dp", min_size=3 if signal_name != "none" else 2) as elastic:
    net = nn.Linear(4, 1, rng=np.random.default_rng(7))
    model = DistributedDataParallel(net, elastic.mesh["dp"])
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "own": np.full(3, me)}
    for step in elastic.steps(state, until, batches=ElasticBatches(30, 12)):
        with step as mesh:
            if me == 1 and step.number == 2:
                if signal_name == "none":
                    raise ZeroDivisionError
                os.kill(os.getpid(), getattr(signal, signal_name))
            x = np.eye(4, dtype=np.float32)[step.share.samples % 4]
            model.backward(step.share.weight * (model(x) - 1) / len(x))
            step.on_commit(optimizer.step)
            step.on_commit(optimizer.zero_grad)
    values = b"".join(p.data.tobytes() for p in net.parameters()).hex()
    print(f"rank {me} ends in {mesh.mesh.tolist()} after {elastic.committed}: {values}", flush=True)
"""
ENDS = re.compile(r"rank (\d) ends in \[(.*)\] after (\d+): (\w+)")


def run(tmp_path, *options, arguments):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "meshlib.launcher", "-n", "3", *options, str(program)]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=55, check=False
    )


@pytest.mark.parametrize("options", [("--replace", "1"), ("--spares", "1")])
def test_another_comes_for_a_lost_rank(tmp_path, options):
    done = run(tmp_path, *options, arguments=["SIGKILL"])
    assert done.returncode == 0, done.stderr
    ends = ENDS.findall(done.stdout)
    assert sorted(rank for rank, *_ in ends) == ["0", "2", "3"]
    assert {(mesh, steps) for _, mesh, steps, _ in ends} == {("0, 3, 2", "6")}
    assert len({values for *_, values in ends}) == 1
    what = "rank 3 comes for it" if "--replace" in options else "the others go on"
    assert f"meshrun: rank 1 was killed by SIGKILL; {what}" in done.stderr


def test_the_others_go_on_without_a_rank_whose_program_fails(tmp_path):
    done = run(tmp_path, "--replace", "0", arguments=["none"])
    assert done.returncode == 0, done.stderr
    ends = ENDS.findall(done.stdout)
    assert sorted(rank for rank, *_ in ends) == ["0", "2"]
    assert "rank 1 ended with ZeroDivisionError; the others go on" in done.stderr


def test_when_all_fail_the_job_has_failed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os\nraise ValueError('of rank ' + os.environ['RANK'])\n")
    command = [sys.executable, "-m", "meshlib.launcher", "-n", "2", "--replace", "1", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 1
    assert "ValueError: of rank" in done.stderr


def test_several_nodes_are_refused(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("")
    command = [sys.executable, "-m", "meshlib.launcher", "--replace", "1", "--nnodes", "2"]
    done = subprocess.run(
        [*command, "--master-addr", "127.0.0.1", str(program)],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 2
    assert "--replace and --spares are for one node" in done.stderr
