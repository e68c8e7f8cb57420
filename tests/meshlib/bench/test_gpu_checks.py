"""The checks of ``make gpu-check``, on a device and an array library that are made of NumPy.

They show that the checks themselves are right, and what is true of any library with CuPy's
interface: conformance, modules and gradients. Of a real GPU they say nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import meshlib as dist
from meshlib.testing import run_ranks
from tests.gpu import check, gpu_ranks
from tests.support.gpu import ended, fake_cupy
from tests.support.gpu.fake_nccl import FakeNccl
from tests.support.gpu.host_driver import HostDriver, HostMachine

WAYS = [("staged", 2), ("cuda_ipc", 3), ("nccl", 2)]
FEW = 60


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0]}-{way[1]}")
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    backend, ranks = request.param
    module = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    # So long are the delays of a real device; here nothing is done before it is asked for.
    monkeypatch.setattr(gpu_ranks, "delayed", lambda _, array, value: array.fill(value))
    monkeypatch.setattr(gpu_ranks, "_STEPS", 3)
    monkeypatch.setattr(gpu_ranks, "_POISONED", (64, 4096))

    def run(name: str) -> None:
        machine = HostMachine(ranks if backend == "nccl" else 1)
        monkeypatch.setattr(
            "transport._nccl.communicator.load_nccl", lambda: FakeNccl(HostDriver(machine))
        )
        monkeypatch.setattr("meshlib._collectives.symmetric.cuda_driver", fake_cupy.driver)

        def rank() -> None:
            device = dist.get_rank() % machine.devices
            with fake_cupy.as_rank(machine, device):
                gpu_ranks.CHECKS[name](module)

        run_ranks(rank, ranks, backend=f"cpu:inproc,cuda:{backend}")

    return run


@pytest.mark.parametrize(
    "name",
    ["streams", "other_streams_wait", "lifetimes", "symmetric", "wrong_device", "mismatch"],
)
def test_checks(run: Any, name: str) -> None:
    run(name)


def test_modules_of_device_arrays_train_as_those_of_numpy_do(run: Any) -> None:
    run("cupy_ddp")


def test_conformance(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    conform = gpu_ranks.conform

    def some(cases: list[Any]) -> None:
        assert len(cases) > 500
        conform(cases[:: len(cases) // FEW])

    monkeypatch.setattr(gpu_ranks, "conform", some)
    monkeypatch.setattr(gpu_ranks, "_LEAST_CASES", 1)
    run("cupy_conformance")


def test_a_check_that_fails_is_seen(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the checks can fail: collectives that do nothing."""
    monkeypatch.setattr(dist, "all_reduce", lambda x, *_, **__: x)
    with pytest.raises(dist.testing.RankError, match="AssertionError"):
        run("lifetimes")


def test_all_checks_are_run_by_the_tests() -> None:
    from tests.gpu import test_gpu

    listed = {*test_gpu.CHECKS, *test_gpu.JAX_CHECKS, *test_gpu.LAST, "no_host_block"}
    assert listed == set(gpu_ranks.CHECKS)
    assert test_gpu.RANKS.exists()


def test_the_report_is_written_when_parts_of_it_fail(tmp_path: Path) -> None:
    report = check.Report(tmp_path)

    def broken() -> tuple[bool, list[str]]:
        raise RuntimeError("cudaErrorNoDevice")

    assert not report.add("# Machine", broken)
    assert "cudaErrorNoDevice" in (tmp_path / "gpu-report.md").read_text()
    assert report.add("## Tests", lambda: (True, ["all passed"]))
    text = (tmp_path / "gpu-report.md").read_text()
    assert text.index("cudaErrorNoDevice") < text.index("## Tests") < text.index("all passed")


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "printed"
    endless = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert ended.run(endless, 0.0, out, whole_group=True) == ended.TIMED_OUT
    assert ended.run([sys.executable, "-c", "print('done'); exit(3)"], 30, out) == 3
    assert out.read_text() == "done\n"
