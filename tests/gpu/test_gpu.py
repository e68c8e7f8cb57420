"""Every backend for GPUs, on a real one: real processes, which share it if they are several.

Not a line of this has decided anything before it ran on a GPU: see the table in docs/gpu.md.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.timeout(280)]
RANKS = Path(__file__).with_name("gpu_ranks.py")
# NCCL refuses ranks that share a GPU: one rank, on any machine.
WAYS = [("staged", 2), ("staged", 3), ("cuda_ipc", 2), ("cuda_ipc", 4), ("nccl", 1)]


def run(backend: str, ranks: int, what: str) -> None:
    command = [sys.executable, "-m", "meshlib.launcher.cli", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(RANKS), backend, what],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("what", ["values", "streams"])
@pytest.mark.parametrize(("backend", "ranks"), WAYS)
def test_cupy_arrays(backend: str, ranks: int, what: str) -> None:
    run(backend, ranks, what)


@pytest.mark.parametrize(("backend", "ranks"), WAYS)
def test_jax_arrays(backend: str, ranks: int) -> None:
    if importlib.util.find_spec("jax_cuda12_plugin") is None and (
        importlib.util.find_spec("jax_cuda13_plugin") is None
    ):
        pytest.skip("needs JAX for CUDA: pip install 'jax[cuda13]'")
    run(backend, ranks, "jax")


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "int64", "complex64"])
def test_kernels_fold_as_numpy_does(name: str) -> None:
    from transport.cuda import load_driver
    from transport.reduce_op import RedOpType, ReduceOp

    cupy = importlib.import_module("cupy")
    driver, dtype = load_driver(), np.dtype(name)
    rng = np.random.default_rng(0)
    for count in (1, 15, 4097):
        hosts = [rng.integers(-4, 5, count).astype(dtype) for _ in range(3)]
        for kind in set(RedOpType) - {RedOpType.PREMUL_SUM}:
            op = ReduceOp(kind)
            try:
                op.check(dtype)
            except TypeError:
                continue
            arrays = [cupy.asarray(host) for host in hosts]
            out = cupy.empty(count, dtype)
            stream = cupy.cuda.get_current_stream().ptr
            pointers = [array.data.ptr for array in arrays]
            driver.fold(out.data.ptr, pointers, dtype, count, op, stream)
            work = np.dtype(np.float32) if name == "float16" else dtype
            total = hosts[0].astype(work)
            for host in hosts[1:]:
                op.combine(total, host.astype(work), total)
            op.finish(total, 3)
            assert np.allclose(out.get(), total.astype(dtype), rtol=1e-6), (name, count, kind)
