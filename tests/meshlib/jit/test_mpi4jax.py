"""mpi4jax's own tests pass over ``meshlib.jit``; see ``mpi4jax_tests.py``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed (the extra 'jax')")

from tests.meshlib.jit.mpi4jax_tests import LIMIT_SECONDS, run_job

SOURCES = os.environ.get("MPI4JAX_SOURCES", "")


@pytest.mark.skipif(not SOURCES, reason="MPI4JAX_SOURCES does not name a folder with mpi4jax")
@pytest.mark.timeout(LIMIT_SECONDS + 30)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mpi4jaxs_own_tests_of_collectives_pass(ranks: int) -> None:
    job = run_job(Path(SOURCES).resolve(), ranks)
    assert job.returncode == 0, job.stdout
    assert job.stdout.count(" passed") == ranks
