"""Ranks that are threads share XLA's threads: there are enough, or the error says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

# 6 ranks on 2 cores, whatever the machine has.
STEP = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp, numpy as np
from meshlib.testing import run_ranks
from parallel.jax import DistributedDataParallel

SIZES = {"large": 300_007, "odd": 50_001, "small": 7}

def job():
    model = DistributedDataParallel({name: jnp.zeros(size) for name, size in SIZES.items()})
    weights = {name: jnp.ones(size) for name, size in SIZES.items()}
    loss = lambda params, weights: sum((params[name] * weights[name]).sum() for name in params)
    step = jax.jit(model.value_and_grad(loss))
    return [float(np.asarray(step(model.params, weights)[1]["odd"])[0]) for _ in range(20)]

assert run_ranks(job, 6, timeout=20) == [[1.0] * 20] * 6
assert "NPROC" not in os.environ
"""

# JAX has begun with 2 threads, and a rank is not done in time.
LATE = """
import time
import jax.numpy as jnp, numpy as np
import meshlib as dist
from meshlib.testing import run_ranks

jnp.ones(3).block_until_ready()
def job():
    if dist.get_rank() == 0:
        dist.recv(np.zeros(3), src=1)
    else:
        time.sleep(3)

run_ranks(job, 3, timeout=1)
"""


def run(program: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_six_ranks_train_on_two_cores():
    ended = run(STEP)
    assert ended.returncode == 0, ended.stderr


def test_a_run_that_may_have_had_too_few_threads_says_so():
    ended = run(LATE, NPROC="2")
    assert "3 ranks share the 2 threads that XLA began with" in ended.stderr
    assert "were not done after" in ended.stderr
