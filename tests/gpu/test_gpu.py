"""Every backend for GPUs, on a real one: real processes, which share it if they are several.

Not a line of this has decided anything before it ran on a GPU: see the table in docs/run/gpu.md.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.gpu import ended

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("default"),  # CuPy's and its libraries' warnings are not ours
]
RANKS = Path(__file__).with_name("gpu_ranks.py")
# NCCL refuses ranks that share a GPU: one rank, on any machine.
WAYS = [("staged", 2), ("cuda_ipc", 2), ("cuda_ipc", 4), ("nccl", 1)]
CHECKS = [
    "cupy_conformance",
    "streams",
    "other_streams_wait",
    "lifetimes",
    "symmetric",
    "wrong_device",
    "cupy_ddp",
]
JAX_CHECKS = ["jax_conformance", "jax_jit", "jax_training"]
# It breaks a group, and whoever comes after it must not be taken for its victim.
LAST = ["mismatch"]
_NOT_REACHED = "not reached"
_LAUNCH_SECONDS, _WAY_SECONDS, _LEAST_SECONDS = 110, 150, 10
_BEGUN, _LIMIT = time.monotonic(), float(os.environ.get("MESHLIB_GPU_SECONDS", "inf"))


def has_jax() -> bool:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(plugin) is not None for plugin in plugins)


def checks_of(backend: str, ranks: int) -> list[str]:
    checks = list(CHECKS)
    if backend != "staged":
        checks.insert(1, "no_host_block")
    if has_jax() and ranks <= 2:
        checks += JAX_CHECKS
    return [*checks, *LAST]


def seconds_left() -> float:
    """The seconds that ``check.py`` has left for tests; without it there is no limit."""
    return _LIMIT - (time.monotonic() - _BEGUN)


def launch(backend: str, ranks: int, checks: list[str]) -> tuple[int, str]:
    """Run ``checks`` one after the other; return the exit status and all that was said."""
    seconds = min(_LAUNCH_SECONDS, seconds_left())
    if seconds < _LEAST_SECONDS:
        return ended.TIMED_OUT, "not begun: the time for tests was used up"
    command = [sys.executable, "-m", "meshlib._launcher", f"--nproc-per-node={ranks}"]
    environment = {
        **ended.environment(),
        # Several ranks share the card: JAX would take three quarters of it for each.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # A rank that is stuck says where before it is ended.
        "MESHLIB_GPU_RANK_SECONDS": str(seconds - _LEAST_SECONDS / 2),
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "said"
        status = ended.run([*command, str(RANKS), backend, *checks], seconds, out, environment)
        said = out.read_text(errors="replace")
    if status == ended.TIMED_OUT:
        said += f"\n(ended after {seconds:.0f} s)"
    return status, said


class Outcomes:
    """The result of each check of each backend; one launch for as many as pass."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, int], dict[str, str | None]] = {}

    def of(self, backend: str, ranks: int, check: str) -> str | None:
        """Return None if the check passed, else what was said."""
        key = backend, ranks
        if key not in self._said:
            self._said[key] = self._run(backend, ranks)
        return self._said[key].get(check, _NOT_REACHED)

    def _run(self, backend: str, ranks: int) -> dict[str, str | None]:
        left, outcomes = checks_of(backend, ranks), dict[str, str | None]()
        began = time.monotonic()
        while left and time.monotonic() - began < _WAY_SECONDS:
            status, said = launch(backend, ranks, left)
            lines = said.splitlines()
            passed = [
                check
                for check in left
                if sum(f" {check} " in line and "passed " in line for line in lines) == ranks
            ]
            outcomes |= dict.fromkeys(passed)
            left = left[len(passed) :]
            if status == 0:
                break
            # The one that ended it, be it the way out behind the last one; on with the rest.
            outcomes[left.pop(0) if left else passed[-1]] = said
            if len([said for said in outcomes.values() if said]) > 2:
                break  # nothing works: the rest would say no more
        return outcomes


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.mark.parametrize("check", ["no_host_block", *CHECKS, *JAX_CHECKS, *LAST])
@pytest.mark.parametrize(("backend", "ranks"), WAYS)
@pytest.mark.timeout(540)
def test_ranks(outcomes: Outcomes, backend: str, ranks: int, check: str) -> None:
    if check in JAX_CHECKS and not has_jax():
        pytest.skip("needs JAX for CUDA: pip install 'jax[cuda13]'")
    if check not in checks_of(backend, ranks):
        pytest.skip(f"is not for {backend} with {ranks} ranks")
    said = outcomes.of(backend, ranks, check)
    assert said is None, said


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "int8", "int64", "complex64"])
def test_kernels_reduce_as_numpy_does(name: str) -> None:
    from transport._cuda import cuda_driver
    from transport._operands.reduce_op import RedOpType, ReduceOp

    cupy = importlib.import_module("cupy")
    driver, dtype = cuda_driver(), np.dtype(name)
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
            driver.reduce(out.data.ptr, pointers, dtype, count, op, stream)
            work = np.dtype(np.float32) if name == "float16" else dtype
            total = hosts[0].astype(work)
            for host in hosts[1:]:
                op.combine(total, host.astype(work), total)
            op.finish(total, 3)
            assert np.allclose(out.get(), total.astype(dtype), rtol=1e-6), (name, count, kind)


def test_two_ranks_on_one_gpu_are_told_by_nccl() -> None:
    """NCCL itself would refuse, or hang."""
    from transport._cuda import cuda_driver

    if cuda_driver().device_count() > 1:
        pytest.skip("there are several GPUs: the ranks would still take the first one")
    status, said = launch("nccl", 2, ["lifetimes"])
    assert status
    assert "both use the GPU" in said
    assert "cuda:cuda_ipc" in said
