"""Ranks that are forked from one process, and what they must not have in common."""

import json
import os
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

SHOW = (PROGRAMS / "show_rank.py").read_text()


def shown(result):
    assert result.code == 0, result.err
    assert result.err == ""
    return sorted(map(json.loads, result.out.splitlines()), key=lambda seen: seen["rank"])


def test_forked_ranks_are_the_launchers_own_children_and_draw_apart(meshrun):
    process = meshrun.start("--nproc-per-node", "3", meshrun.script(SHOW))
    seen = shown(meshrun.finish(process))
    assert [rank["rank"] for rank in seen] == ["0", "1", "2"]
    assert all(rank["warm"] and rank["leads"] and rank["threads"] == 1 for rank in seen)
    assert {rank["launcher"] for rank in seen} == {process.pid}
    assert len({drawn for rank in seen for drawn in rank["drawn"]}) == 6
    cold = shown(meshrun.run("--start", "exec", "--nproc-per-node", "3", meshrun.script(SHOW)))
    assert not any(rank["warm"] for rank in cold)
    assert seen[0]["files"] == cold[0]["files"]  # nothing of the server's is open in a rank


def test_a_program_that_is_alone_is_not_forked(meshrun):
    (seen,) = shown(meshrun.run(meshrun.script(SHOW)))
    assert not seen["warm"]


def test_where_numpy_cannot_be_imported_ranks_begin_by_themselves(meshrun):
    meshrun.script("raise RuntimeError('not this one')", "numpy.py")
    script = meshrun.script("import os; print('rank', os.environ['RANK'])")
    result = meshrun.run("--nproc-per-node", "2", script)
    assert (result.code, result.err) == (0, "")
    assert sorted(result.out.splitlines()) == ["rank 0", "rank 1"]


def test_a_forked_rank_that_is_killed_is_told_as_any_other(meshrun):
    script = meshrun.script("""
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)
    """)
    result = meshrun.run("--nproc-per-node", "2", script)
    assert result.code == 137
    assert "rank 1" in result.err
    assert "SIGKILL" in result.err


@pytest.mark.parametrize("way", ["fork", "exec"])
def test_what_a_program_leaves_open_is_ended_as_python_does(meshrun, tmp_path, way):
    script = meshrun.script((PROGRAMS / "leave_things_open.py").read_text())
    result = meshrun.run("--start", way, "--nproc-per-node", "2", script, str(tmp_path))
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == ["unflushed"] * 2
    for rank in "01":
        lines = (tmp_path / rank).read_text().split()
        assert lines[:3] == ["thread", "exit", "finalized"]
        assert sorted(lines[3:]) == ["deleted", "deleted", "resumed"]
        assert (tmp_path / f"{rank}-unflushed").read_text() == "unflushed"


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_numa_binds_ranks_and_says_so(meshrun, start):
    if not Path("/sys/devices/system/node/node0/cpulist").exists():
        pytest.skip("the kernel shows no NUMA nodes")
    cpus = os.sched_getaffinity(0)
    script = meshrun.script("import os\nprint(sorted(os.sched_getaffinity(0)))")
    done = meshrun.run("-n", "2", "--numa", "--start", start, script)
    assert done.code == 0, done.err
    assert "meshrun: NUMA: rank 0 to node " in done.err
    bound = [set(json.loads(line)) for line in done.out.splitlines()]
    assert len(bound) == 2
    assert all(one and one <= cpus for one in bound)


def test_a_rank_is_bound_before_its_program_begins(meshrun):
    """To one CPU, which a machine with a single node cannot show."""
    meshrun.script(
        """
        import os
        from meshlib._launcher.options import arguments
        from meshlib._launcher.options.launch import NumaNode
        cpu = min(os.sched_getaffinity(0))
        arguments.cpus_of_ranks = lambda ranks: (NumaNode(7, (cpu,)),) * ranks
        """,
        "sitecustomize.py",
    )
    script = meshrun.script("import os\nprint(sorted(os.sched_getaffinity(0)))")
    here = {"PYTHONPATH": str(meshrun.folder)}
    done = meshrun.run("-n", "2", "--numa", script, env=here)
    cpu = min(os.sched_getaffinity(0))
    assert done.out == f"[{cpu}]\n" * 2, done.err
    assert f"rank 1 to node 7 (CPUs {cpu})" in done.err
