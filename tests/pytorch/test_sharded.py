"""Beside torch's DTensor and FSDP2: the same parts, and the same training of the same weights."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="needs PyTorch: pip install 'meshlib-spmd[torch]', or make test-torch",
    ),
    pytest.mark.processes,
    pytest.mark.timeout(300),
]


def run(*arguments: str | Path) -> str:
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(command, check=False, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_parts_are_those_of_dtensor():
    assert "150 layouts are DTensor's" in run(PROGRAMS / "dtensor_layouts.py")


def test_training_is_that_of_fsdp2(tmp_path):
    meshrun = "-m", "meshlib._launcher", "--nproc-per-node", "4"
    printed = run(*meshrun, PROGRAMS / "sharded_training.py", tmp_path)
    assert printed.count("equal after 5 steps") == 8, printed
