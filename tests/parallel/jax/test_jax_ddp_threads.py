"""Ranks that are threads share XLA's threads: there are enough, or a program is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

# 2 cores, whatever the machine has.
STEPS = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp, numpy as np
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel

SIZES = {"large": 300_007, "odd": 50_001, "small": 7}
def zeros(): return {name: jnp.zeros(size) for name, size in SIZES.items()}
def ones(): return {name: jnp.ones(size) for name, size in SIZES.items()}
def train(params, weights):
    model = DistributedDataParallel(params)
    loss = lambda params, weights: sum((params[name] * weights[name]).sum() for name in params)
    step = jax.jit(model.value_and_grad(loss))
    return [float(np.asarray(step(model.params, weights)[1]["odd"])[0]) for _ in range(20)]
"""

JAX_BEGINS_INSIDE = """
assert run_ranks(lambda: train(zeros(), ones()), 6, timeout=30) == [[1.0] * 20] * 6
assert "NPROC" not in os.environ
"""

# JAX has begun with the two threads of two cores, and the ranks use arrays of then.
JAX_BEGAN_BEFORE = """
before, weights = zeros(), ones()
for size in (3, 6, 10):
    assert run_ranks(train, size, before, weights, timeout=30) == [[1.0] * 20] * size
assert "NPROC" not in os.environ
assert (weights["small"] + 1).devices() == {jax.devices()[0]}
"""

# The user insists on the device whose threads are too few.
PUT_THERE = """
weights = jax.device_put(ones(), jax.devices()[0])
run_ranks(train, 3, zeros(), weights, timeout=30)
"""


def run(program: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize("program", [JAX_BEGINS_INSIDE, JAX_BEGAN_BEFORE])
def test_ranks_train_on_two_cores(program):
    ended = run(STEPS + program)
    assert ended.returncode == 0, ended.stderr


def test_a_program_on_a_device_with_too_few_threads_is_refused():
    ended = run(STEPS + PUT_THERE)
    assert "has put arrays of this program on a JAX device from before run_ranks" in ended.stderr
    assert "too few threads there for 3 ranks" in ended.stderr
