"""``meshrun --replace`` and ``--spares``: the loss of a rank ends no other, and another comes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

PROGRAM = (PROGRAMS / "lose_a_rank.py").read_text()
ENDS = re.compile(r"rank (\d) ends in \[(.*)\] after (\d+): (\w+)")


def run(tmp_path, *options, arguments):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "meshlib._launcher", "-n", "3", *options, str(program)]
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
    what = "rank 3 replaces it" if "--replace" in options else "the other ranks continue"
    assert f"meshrun: rank 1 was killed by SIGKILL; {what}" in done.stderr


def test_the_others_go_on_without_a_rank_whose_program_fails(tmp_path):
    done = run(tmp_path, "--on-failure", "continue", arguments=["none"])
    assert done.returncode == 0, done.stderr
    ends = ENDS.findall(done.stdout)
    assert sorted(rank for rank, *_ in ends) == ["0", "2"]
    assert "rank 1 ended with ZeroDivisionError; the other ranks continue" in done.stderr


def test_when_all_fail_the_job_has_failed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import os\nraise ValueError('of rank ' + os.environ['RANK'])\n")
    command = [sys.executable, "-m", "meshlib._launcher", "-n", "2", "--replace", "1", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 1
    assert "ValueError: of rank" in done.stderr


NODES_PROGRAM = (PROGRAMS / "lose_a_rank_and_a_node.py").read_text()


def test_ranks_and_nodes_come_for_lost_ones_over_several_nodes(meshrun, free_port):
    # Node 2 replaces its rank, 2, by rank 3; node 1 is lost with rank 1, and comes again: rank 4.
    program = meshrun.script(NODES_PROGRAM)
    options = ("--rdzv-endpoint", f"127.0.0.1:{free_port}", "--nnodes=3", "--replace", "1")
    nodes = [meshrun.start(*options, "--node-rank", str(node), program) for node in range(3)]
    lost = meshrun.finish(nodes[1], 50.0)
    nodes[1] = meshrun.start(*options, "--node-rank", "1", program)
    done = [meshrun.finish(node, 50.0) for node in nodes]
    assert lost.code == -signal.SIGKILL
    assert [one.code for one in done] == [0, 0, 0], [one.err for one in done]
    total = f"{3 * 36} {3 * 36} {3 * 36}"
    assert [one.out for one in done] == [
        f"0 0 0 [0, 4, 3] {total}\n",
        f"4 3 0 [0, 4, 3] {total}\n",
        f"3 2 0 [0, 4, 3] {total}\n",
    ]
    assert "meshrun: rank 2 was killed by SIGKILL; rank 3 replaces it" in done[2].err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replace", "0"), "--replace 0 replaces no rank: expected a number from 1 on, or"),
        (("--spares", "1", "--on-failure", "stop"), "--spares 1 and --on-failure stop were both"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, options, words):
    done = run(tmp_path, *options, arguments=[])
    assert done.returncode == 2
    assert words in done.stderr


def test_the_job_ends_as_the_first_rank_does_that_is_left(meshrun):
    script = meshrun.script(
        """
        import os
        import meshlib as dist
        dist.init_process_group()
        rank = dist.get_rank()
        if rank == 0:
            raise SystemExit(3)
        try:
            dist.barrier()
        except dist.RankFailedError:
            dist.shrink_group([])
        raise SystemExit(int(os.environ["CODE"]) if rank == 1 else 5)
        """
    )
    for code in (0, 4):
        done = meshrun.run("-n3", "--on-failure=continue", script, env={"CODE": str(code)})
        assert done.code == code
