"""Ranks that are killed while they save: two runs of tests/chaos/checkpoints.py."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "chaos" / "checkpoints.py"


@pytest.mark.processes
def test_the_newest_complete_checkpoint_loads():
    # One rank is killed, then both; in a process of its own, from which ranks can be forked.
    done = subprocess.run(
        [sys.executable, CHAOS, "--runs", "2"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    expected = "2 runs, 0 wrong; all ranks killed 1 times, rank 1 killed 1 times\n"
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
