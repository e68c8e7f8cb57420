"""Some faults on real processes; ``make chaos`` runs all of them on every transport."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "chaos" / "run.py"


@pytest.mark.processes
@pytest.mark.parametrize(
    "fault", ["mismatch: group", "killed in a large", "killed with a window", "stopped"]
)
def test_every_rank_raises_in_time_and_nothing_is_left(fault, tmp_path):
    done = subprocess.run(
        [sys.executable, RUN, "--transports=tcp", "--ranks=3", "--faults", fault, "--slack=30"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # beside it other tests leave and take away
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 faulted runs, 1 named and clean" in done.stdout
