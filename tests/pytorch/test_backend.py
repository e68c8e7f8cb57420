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

from tests.pytorch.torch_ranks import run

PROGRAMS = Path(__file__).parent / "programs"
# Not by an import: PyTorch takes seconds, and each xdist worker would do it to collect.
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="needs PyTorch: pip install 'meshlib-spmd[torch]', or make test-torch",
    ),
    pytest.mark.processes,
    pytest.mark.timeout(300),
]
NAMES = [
    name
    for path in sorted((PROGRAMS / "cases").glob("*.py"))
    for name in re.findall(r"^@case\ndef (\w+)", path.read_text(), re.MULTILINE)
]


def shared(tmp_path_factory, program: str, ranks: int) -> list[dict[str, str]]:
    """Return what each rank says of each case, from one run that all of pytest's workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{program}-ranks"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        if not folder.exists():
            folder.mkdir()
            (folder / "printed").write_text("\n".join(run(program, ranks, folder)))
    assert all(file.exists() for file in files), (folder / "printed").read_text()
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    return shared(tmp_path_factory, "cases", 4)


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[dict[str, str]]:
    return shared(tmp_path_factory, "broken.py", 2)


def test_nothing_imports_pytorch_but_the_program():
    program = (
        "import sys, meshlib, parallel; meshlib.all_reduce; assert 'torch' not in sys.modules;"
        "import meshlib.torch; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_tensors_of_another_device_go_to_its_backend():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAMS / "other_device.py"],
        check=False,
        timeout=100,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_gives_gloos_results(results, name):
    assert [one[name] for one in results] == [""] * 4


@pytest.mark.parametrize("name", ["mismatch", "mismatch_in_a_work"])
def test_a_mismatch_raises_our_error_on_every_rank(errors, name):
    for message in (one[name] for one in errors):
        assert message.startswith("CollectiveMismatchError: "), message
        assert message.count("broken.py:") == 2  # the line of each rank, not one of PyTorch's


@pytest.mark.parametrize("name", ["mismatch_in_a_future", "mismatch_in_ddp"])
def test_where_pytorch_passes_it_on_the_error_is_named(errors, name):
    for message in (one[name] for one in errors):
        assert "CollectiveMismatchError: " in message, message
        assert message.count("broken.py:") >= 2


def test_a_late_rank_is_named(errors):
    for message in (one["late"] for one in errors):
        assert message.startswith("CollectiveTimeoutError: "), message
        assert "rank 1 has not arrived" in message


def test_a_killed_rank_is_named(errors):
    assert "RankFailedError: rank 1 was lost" in errors[0]["killed_in_ddp"]
    assert errors[0]["after_that"].startswith("RankFailedError: rank 1 was lost")
    assert "killed_in_ddp" not in errors[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another_device", "has no backend for tensors on 'meta'; it has 'cpu:meshlib'"),
        ("sparse", "a tensor has layout torch.sparse_coo; expected a dense one"),
        ("options", "expected None for backend 'meshlib'"),
        ("some_first", "of 2; expected the default group, or another one of all ranks"),
    ],
)
def test_what_it_cannot_do_is_said(errors, name, message):
    for error in (one[name] for one in errors):
        assert message in error, error
