"""The examples of one dim each, as processes: they learn, as one process does where they say so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "dims"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


def run(name, *options, start=("--nproc-per-node", "2")):
    pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")
    command = [Path(sys.executable).with_name("meshrun"), *start, EXAMPLES / f"{name}.py"]
    done = subprocess.run(
        [*map(str, command), *options], capture_output=True, text=True, timeout=140, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("tensor_parallel", 0.1),
        ("pipeline", 0.4),
        ("context_parallel", 0.7),  # half of each sequence cannot be known
        ("expert_parallel", 0.1),
    ],
)
def test_two_ranks_learn_what_one_process_learns(name, share):
    rows = re.findall(r"step \d+: loss (\S+), one process (\S+)", run(name))
    assert len(rows) == 5
    losses = [(float(ours), float(alone)) for ours, alone in rows]
    for ours, alone in losses:
        assert ours == pytest.approx(alone, abs=2e-3)
    assert losses[-1][0] < share * losses[0][0]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("data_parallel", "dp=2"),
        ("fully_sharded", "dp_shard=2"),
        ("fully_sharded", "dp_replicate=2,dp_shard=1"),
    ],
)
def test_digits_in_jit(name, mesh):
    out = run(name, "--epochs", "6", start=("--mesh", mesh))
    losses = [float(value) for value in re.findall(r"epoch +\d+: loss (\d\.\d+)", out)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 4
    accuracy = re.search(r"test accuracy (\d+\.\d)% on 2 ranks", out)
    assert accuracy, out
    assert float(accuracy[1]) >= 90
