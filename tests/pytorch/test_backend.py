"""The backend of ``torch.distributed``: Gloo's results, and our errors inside PyTorch."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Not by an import: PyTorch takes seconds, and each xdist worker would do it to collect.
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="needs PyTorch: pip install 'meshlib-spmd[torch]', or make test-torch",
    ),
    pytest.mark.processes,
    pytest.mark.timeout(300),
]
NAMES = re.findall(r"^@case\ndef (\w+)", (HERE / "cases.py").read_text(), re.MULTILINE)


def run(program: str, ranks: int, folder: Path, *arguments: str) -> list[str]:
    """Run ``program`` as so many ranks, which meet in ``folder``; return what each printed."""
    command = [sys.executable, "-W", "ignore", str(HERE / program)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    """What each rank says of each case, from one run that all of pytest's workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pytorch-cases"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = [folder / f"{rank}.json" for rank in range(4)]
        if not folder.exists():
            folder.mkdir()
            (folder / "said").write_text("\n".join(run("cases.py", 4, folder)))
    assert all(file.exists() for file in files), (folder / "said").read_text()
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", NAMES)
def test_gives_gloos_results(results, name):
    assert [one[name] for one in results] == [""] * 4


MISMATCH = "transport.errors.CollectiveMismatchError: the members of group 'default_pg' of 2 ranks"


@pytest.mark.parametrize("name", ["mismatch", "mismatch_in_a_work"])
def test_a_mismatch_raises_on_every_rank(tmp_path, name):
    for said in run("broken.py", 2, tmp_path, name):
        assert said.startswith(MISMATCH), said
        assert "broken.py:" in said  # whose line made which call


def test_a_mismatch_in_a_future_is_named(tmp_path):
    for said in run("broken.py", 2, tmp_path, "mismatch_in_a_future"):
        assert said.startswith("builtins.RuntimeError: "), said
        assert "CollectiveMismatchError: the members of group 'default_pg'" in said


def test_a_mismatch_in_ddp_is_named(tmp_path):
    for said in run("broken.py", 2, tmp_path, "mismatch_in_ddp"):
        assert "CollectiveMismatchError" in said, said


@pytest.mark.parametrize("name", ["killed", "killed_in_ddp"])
def test_a_killed_rank_is_named(tmp_path, name):
    said = run("broken.py", 2, tmp_path, name)[0]
    assert "RankFailedError" in said, said
    assert "rank 1" in said


def test_a_late_rank_is_named(tmp_path):
    said = run("broken.py", 2, tmp_path, "late")[0]
    assert said.startswith("transport.errors.CollectiveTimeoutError: "), said
    assert "1" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another_device", "has no backend for tensors on 'meta'; it has 'cpu:meshlib'"),
        ("sparse", "a tensor has layout torch.sparse_coo; expected a dense one"),
        ("options", "expected None for backend 'meshlib'"),
    ],
)
def test_what_it_cannot_do_is_said(tmp_path, name, message):
    for said in run("broken.py", 2, tmp_path, name):
        assert message in said, said
