"""``meshrun`` on one node: what ranks are given, and that a program notices nothing else."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import zipapp
from pathlib import Path

import pytest

from meshlib import MeshConfig

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.processes

SHOW_ENVIRONMENT = """
    import json, os
    names = '''RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR
        MASTER_PORT OMP_NUM_THREADS MESHLIB_AGENT_STORE MESHLIB_SECRET MESHLIB_RUN_ID
        MESHLIB_RESTART_COUNT MESHLIB_MESH MESHLIB_TRACE_DIR MESHLIB_ERROR_FILE'''.split()
    print(json.dumps({name: os.environ.get(name) for name in names}), flush=True)
"""


def ranks_of(result):
    assert result.code == 0, result.err
    return sorted(map(json.loads, result.out.splitlines()), key=lambda seen: int(seen["RANK"]))


def test_ranks_get_their_place_in_the_job(meshrun):
    seen = ranks_of(meshrun.run("--nproc-per-node", "3", meshrun.script(SHOW_ENVIRONMENT)))
    assert [rank["RANK"] for rank in seen] == ["0", "1", "2"]
    assert [rank["LOCAL_RANK"] for rank in seen] == ["0", "1", "2"]
    assert len({rank["MESHLIB_ERROR_FILE"] for rank in seen}) == 3
    for name, value in {
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "MESHLIB_RESTART_COUNT": "0",
        "MESHLIB_MESH": None,
    }.items():
        assert {rank[name] for rank in seen} == {value}, name
    for name in ("MASTER_PORT", "MESHLIB_SECRET", "MESHLIB_RUN_ID"):
        assert len({rank[name] for rank in seen}) == 1
    assert len(bytes.fromhex(seen[0]["MESHLIB_SECRET"])) == 32
    assert seen[0]["MESHLIB_AGENT_STORE"] == f"127.0.0.1:{seen[0]['MASTER_PORT']}"


def test_a_single_rank_keeps_its_threads(meshrun):
    (seen,) = ranks_of(meshrun.run(meshrun.script(SHOW_ENVIRONMENT), env={"OMP_NUM_THREADS": "7"}))
    assert seen["WORLD_SIZE"] == "1"
    assert seen["OMP_NUM_THREADS"] == "7"


def test_underscores_stand_for_dashes(meshrun):
    seen = ranks_of(meshrun.run("--nproc_per_node=2", meshrun.script(SHOW_ENVIRONMENT)))
    assert len(seen) == 2


def test_the_mesh_gives_the_number_of_ranks(meshrun):
    script = meshrun.script(SHOW_ENVIRONMENT)
    seen = ranks_of(meshrun.run("--mesh", "dp=2,tp=2", script))
    assert len(seen) == 4
    assert {rank["MESHLIB_MESH"] for rank in seen} == {"dp=2,tp=2"}
    meshrun.script("[mesh]\ndp = 1\ntp = 2\ntimeout = 7\n", "train.TOML")
    seen = ranks_of(meshrun.run("--mesh", "train.TOML", script))
    (mesh,) = {rank["MESHLIB_MESH"] for rank in seen}
    assert MeshConfig.parse(mesh) == MeshConfig.load(meshrun.folder / "train.TOML")
    assert len(seen) == 2


def test_a_launch_inside_a_rank_starts_afresh(meshrun):
    meshrun.script(SHOW_ENVIRONMENT, "inner.py")
    outer = meshrun.script("""
        import subprocess, sys
        inner = [sys.executable, "-m", "meshlib._launcher", "inner.py"]
        raise SystemExit(subprocess.run(inner, timeout=20).returncode)
    """)
    (seen,) = ranks_of(meshrun.run("--mesh", "dp=1", outer))
    assert seen["MESHLIB_MESH"] is None


SHOW_INTERPRETER = (PROGRAMS / "show_interpreter.py").read_text()


@pytest.mark.parametrize(
    "program",
    [
        ["folder/show.py"],
        ["-m", "package.show"],
        ["-m", "package"],
    ],
    ids=["script", "module", "package"],
)
@pytest.mark.parametrize("start", ["exec", "fork"])
def test_a_program_sees_what_it_sees_under_python(meshrun, program, start):
    for name in ("folder/show.py", "package/show.py", "package/__main__.py"):
        meshrun.script(SHOW_INTERPRETER, name)
    meshrun.script("", "package/__init__.py")
    arguments = [*program, "--config", "x", "-m", "--", "y"]
    expected = meshrun.run(*arguments, command=[sys.executable])
    assert expected.code == 0, expected.err
    got = meshrun.run("--start", start, *arguments)
    assert got.code == 0, got.err
    assert got.out.splitlines()[1:] == expected.out.splitlines()[1:] == ["late and alive"]
    assert json.loads(got.out.splitlines()[0]) == json.loads(expected.out.splitlines()[0])
    assert got.err == ""


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_directory_with_a_main_runs(meshrun, how):
    show = "import os, sys, helper; print(sys.argv[1:], helper.X, os.getcwd() in sys.path)"
    meshrun.script(show, "app/__main__.py")
    meshrun.script("X = 5", "app/helper.py")
    result = meshrun.run("--start", how, "app", "a")
    assert result.out == "['a'] 5 False\n", result.err  # its parent is not where Python looks


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_zip_file_with_a_main_is_a_program(meshrun, how):
    meshrun.script("import sys, helper; print(sys.argv[1:], helper.X)", "app/__main__.py")
    meshrun.script("X = 6", "app/helper.py")
    archive = meshrun.folder / "app.pyz"
    zipapp.create_archive(meshrun.folder / "app", archive, "/usr/bin/env python3")
    result = meshrun.run("--start", how, "-n", "2", str(archive), "a b")
    assert (result.code, result.out) == (0, "['a b'] 6\n" * 2), result.err


def test_any_program_runs_without_python(meshrun):
    result = meshrun.run(
        "--nproc-per-node", "2", "--no-python", "sh", "-c", "echo $RANK of $1", "-", "x"
    )
    assert sorted(result.out.splitlines()) == ["0 of x", "1 of x"]
    assert result.code == 0


def test_two_jobs_at_once_need_no_flags(meshrun):
    script = meshrun.script(SHOW_ENVIRONMENT)
    jobs = [meshrun.start("--nproc-per-node", "2", script) for _ in range(2)]
    seen = [ranks_of(meshrun.finish(job)) for job in jobs]
    assert [len(job) for job in seen] == [2, 2]
    for name in ("MESHLIB_SECRET", "MESHLIB_RUN_ID", "MESHLIB_ERROR_FILE"):
        assert seen[0][0][name] != seen[1][0][name]


def test_the_port_of_the_store_can_be_chosen(meshrun, free_port):
    script, port = meshrun.script(SHOW_ENVIRONMENT), str(free_port)
    with socket.create_server(("127.0.0.1", free_port)):
        result = meshrun.run("--master-port", port, script)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("meshrun: ")
        assert f"port {port}" in result.err
    (seen,) = ranks_of(meshrun.run("--master-port", port, script))
    assert seen["MASTER_PORT"] == port


def test_ranks_are_started_again_after_a_failure(meshrun):
    script = meshrun.script("""
        import os
        attempt, rank = int(os.environ["MESHLIB_RESTART_COUNT"]), os.environ["RANK"]
        print("attempt", attempt, "rank", rank, flush=True)
        if rank == "1" and attempt < 2:
            raise ValueError(f"not yet {attempt}")
    """)
    result = meshrun.run("--nproc-per-node", "2", "--max-restarts", "3", script)
    assert result.code == 0
    assert {f"attempt {i} rank 1" for i in range(3)} <= set(result.out.splitlines())
    assert result.err.count("ValueError: not yet") == 2
    assert "Traceback" not in result.err
    result = meshrun.run("--nproc-per-node", "2", "--max-restarts", "1", script)
    assert result.code == 1
    assert "after 2 attempts" in result.err
    assert result.err.endswith("ValueError: not yet 1\n")


def test_bad_usage_is_named_before_anything_starts(meshrun):
    meshrun.script("print('started')", "ok.py")
    result = meshrun.run("--nproc-per-node", "0", "ok.py")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("meshrun: --nproc-per-node: expected a number of ranks >= 1")
    assert result.err.count("\n") == 1


def test_help_shows_each_option_once(meshrun):
    result = meshrun.run("--help")
    assert result.code == 0
    assert result.out.count("[--nproc-per-node N]") == 1  # the usage
    assert len(re.findall(r"^  --nproc-per-node\b", result.out, re.MULTILINE)) == 1  # the list
    assert "nproc_per_node" not in result.out


def test_the_interpreter_of_ranks_is_the_launchers(meshrun):
    script = meshrun.script("import sys; print(sys.executable)")
    assert meshrun.run(script).out.strip() == sys.executable
    assert os.path.exists(sys.executable)
