"""``meshlib top``: the picture as text, and which job is meant."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace

import pytest

from meshlib._diagnosis.sampling.sample import Coordinate
from meshlib._events.events import RankLost
from meshlib._launcher.options.arguments import parse
from meshlib._monitor.command import main
from meshlib._monitor.jobs import RunningJob, find, running, write
from meshlib._monitor.text import lines
from meshlib._monitor.view import JobView
from tests.meshlib.monitor.monitor_samples import open_call, sample

NOW = 1000.0


def picture(view, width=100, height=40, *, paint=False):
    view.tick(NOW)
    return lines(view, NOW, width, height, paint=paint).splitlines()


@pytest.fixture
def view():
    view = JobView("train.py", 4)
    for rank in (0, 1, 3):
        view.take(sample(rank, inside=0.1 if rank == 3 else 0.6), NOW)
    view.take(replace(sample(1, 2), open_calls=[open_call(0.5, waiting_for=3)]), NOW)
    view.on_event(RankLost(2, "was killed by SIGKILL"), NOW)
    return view


def test_a_picture_has_it_all(view):
    shown = picture(view, 160)
    assert shown[1].startswith("3 ranks are present; rank 2 was lost; rank 3 keeps the others wait")
    mesh = shown.index("dp ↓  tp →")
    assert shown[mesh + 1 : mesh + 3] == ["  0  1c", "     3!"]
    text = "\n".join(shown)
    assert "   2  lost       was killed by SIGKILL" in text
    assert "#7 all_reduce on dp for 500 ms, waits for rank 3, train.py:3 in f" in text
    assert "\x1b" not in text
    assert shown[-1].endswith("lost     rank 2 was killed by SIGKILL")


def test_a_picture_is_no_larger_than_the_terminal(view):
    shown = picture(view, 60, 14)
    assert len(shown) <= 14
    assert all(len(line) <= 60 for line in shown)
    assert any("\x1b[" in line for line in picture(view, paint=True))


def test_of_many_ranks_those_come_first_that_need_to_be_looked_at():
    view = JobView("", 200)
    for rank in range(200):
        view.take(sample(rank, size=200, mesh=[], inside=0.1 if rank == 150 else 0.6), NOW)
    view.on_event(RankLost(100, "was killed"), NOW)
    shown = picture(view, 100, 20)
    table = next(i for i, line in enumerate(shown) if line.startswith(" rank"))
    assert [line.split()[0] for line in shown[table + 1 : table + 4]] == ["100", "150!", "0"]
    assert any(line.strip().startswith("and ") for line in shown)
    assert len(shown) <= 20


def test_a_mesh_of_three_dims_is_drawn_in_blocks():
    view = JobView("", 8)
    for rank in range(8):
        place = [Coordinate(n, rank >> s & 1, 2) for n, s in (("pp", 2), ("dp", 1), ("tp", 0))]
        view.take(sample(rank, size=8, mesh=place), NOW)
    shown = picture(view)
    begin = shown.index("pp=0  dp ↓  tp →")
    assert shown[begin + 3 : begin + 6] == ["pp=1  dp ↓  tp →", "  4  5 ", "  6  7 "]


# ------------------------------------------------------------------ which job


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def job(name, program, **other):
        folder = tmp_path / f"meshrun-{name}"
        folder.mkdir(mode=0o700)
        made = RunningJob(name, "127.0.0.1", len(name), "00", program, os.getpid(), 4)
        write(folder, replace(made, **other))
        return folder / "job.json"

    return job


def test_the_only_job_is_meant(jobs):
    with pytest.raises(ValueError, match="no job of this user's runs on this machine"):
        find(None)
    jobs("20260101-a", "train.py")
    assert find(None).name == "20260101-a"
    with pytest.raises(ValueError, match=r"no job .* called 'x'; expected one of .*train.py"):
        find("x")


def test_a_job_is_meant_by_its_name_program_or_process(jobs):
    jobs("20260101-a", "train.py")
    jobs("20260102-bc", "/some/where/other.py", pid=os.getppid())
    assert find("20260102").program == "/some/where/other.py"
    assert find("train").name == "20260101-a"
    assert find("other.py").name == "20260102-bc"
    assert find(str(os.getppid())).name == "20260102-bc"
    with pytest.raises(ValueError, match="several jobs run here"):
        find(None)


def test_launchers_of_the_same_store_run_one_job(jobs):
    jobs("20260101-a", "train.py")
    jobs("20260101-b", "train.py")
    assert len(running()) == 1


def test_only_what_a_launcher_of_this_user_has_left_counts(jobs):
    jobs("open", "train.py").chmod(0o644)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    jobs("ended", "train.py", pid=ended.pid)
    jobs("broken", "train.py").write_text("{")
    unknown = jobs("unknown", "train.py")
    unknown.write_text(json.dumps(asdict(RunningJob("", "", 1)) | {"more": 1}))
    assert running() == []


def test_a_job_is_meant_by_its_stores_address(monkeypatch):
    monkeypatch.setenv("MESHLIB_SECRET", "ab" * 16)
    job = find("[::1]:29500")
    assert (job.host, job.port, job.secret) == ("::1", 29500, "ab" * 16)


def test_no_job_is_one_line(jobs, capsys, monkeypatch):
    monkeypatch.setattr("meshlib._monitor.jobs._CONNECT_SECONDS", 0.1)
    jobs("a", "train.py", port=1)
    assert main(["--once"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("meshlib top: the store of job a cannot be reached")
    assert printed.count("\n") == 1


# ------------------------------------------------------------------ meshrun --monitor [PORT]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ([], None),
        (["--monitor"], ("127.0.0.1", 0)),
        (["--monitor", "8000"], ("127.0.0.1", 8000)),
        (["--monitor=8000"], ("127.0.0.1", 8000)),
        (["--monitor", "[::1]:0"], ("::1", 0)),
        (["--monitor", "0.0.0.0:80"], ("0.0.0.0", 80)),
        (["-n", "2", "--monitor", "-v"], ("127.0.0.1", 0)),
    ],
)
def test_the_page_has_an_address(tmp_path, monkeypatch, given, address):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = parse([*given, "train.py", "--monitor", "x"])
    assert options.monitor == address
    assert (options.program.target, options.program.arguments) == ("train.py", ("--monitor", "x"))


@pytest.mark.parametrize("address", ["x", "1:x", "70000"])
def test_an_address_that_is_none_is_refused(tmp_path, monkeypatch, capsys, address):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit):
        parse([f"--monitor={address}", "train.py"])
    assert "expected PORT or HOST:PORT" in capsys.readouterr().err


def test_a_launcher_shows_its_job_without_numpy():
    code = (
        "import sys, meshlib._launcher.launch, meshlib._launcher.agent;"
        "import meshlib._monitor.server, meshlib._monitor.command;"
        "sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
