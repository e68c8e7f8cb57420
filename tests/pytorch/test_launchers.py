"""PyTorch's programs under torchrun and meshrun: who starts them, and how they fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = "torch.distributed.run"
MESHRUN = "meshlib._launcher"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,
        reason="needs PyTorch: pip install 'meshlib-spmd[torch]', or make test-torch",
    ),
    pytest.mark.processes,
    pytest.mark.timeout(300),
]


def launch(launcher: str, ranks: int, program: Path, *arguments: str):
    return subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", launcher, "--nproc-per-node", str(ranks)),
            *(str(program), *arguments),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=200,
        capture_output=True,
        text=True,
    )


def test_under_torchrun_the_survivors_name_a_killed_rank():
    done = launch(TORCHRUN, 3, PROGRAMS / "killed.py", "plain")
    for rank in (0, 2):
        assert f"[rank{rank}]: transport._errors.RankFailedError: rank 1 was lost" in done.stderr


def test_a_handler_of_sigterm_that_makes_a_call_raises_at_once():
    done = launch(TORCHRUN, 2, PROGRAMS / "killed.py", "handler")
    assert "handler of rank 0: RankFailedError" in done.stdout, done.stdout + done.stderr


PROGRAM = """
import sys
import torch
import torch.distributed as dist

for _ in range(2):
    dist.init_process_group(sys.argv[1])
    x = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(x)
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)
    assert x.tolist() == [6.0, 6.0], x
    dist.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("backend", ["meshlib", "gloo"])
def test_under_meshrun_env_meets_in_its_store(tmp_path, backend):
    """No import of meshlib: PyTorch loads the backend. Lightning and accelerate start like this."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = launch(MESHRUN, 2, program, backend)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_calls_can_be_looked_at():
    command = [sys.executable, "-W", "ignore", PROGRAMS / "looked_at.py"]
    done = subprocess.run(command, check=False, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
