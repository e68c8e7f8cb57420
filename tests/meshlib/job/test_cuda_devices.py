"""The GPU of each rank, and the warning if there are not enough."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

import meshlib as dist
from meshlib._groups.backend import parse_backend
from meshlib._job.current import current_world
from meshlib._job.starting import gpu as cuda_devices
from meshlib.testing import RankError, run_ranks
from tests.support.gpu.host_driver import HostDriver, HostMachine


def choose(monkeypatch: pytest.MonkeyPatch, devices: int, local_rank: int, ranks: int):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr("transport._nccl.library.has_provider", lambda: True)

    def body() -> tuple[str | None, int]:
        driver = HostDriver(HostMachine(devices))
        backend = cuda_devices.choose_cuda_device(current_world(), driver)
        return backend, driver.current_device()

    return run_ranks(body, 1)[0]


def test_the_local_rank_is_the_number_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, 4, 2, 4) == ("cpu:auto,cuda:nccl", 2)
    assert choose(monkeypatch, 8, 0, 1) == ("cpu:auto,cuda:nccl", 0)


def test_sharing_is_allowed_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="4 ranks of this host share 2 GPUs"):
        assert choose(monkeypatch, 2, 3, 4) == (None, 1)


def test_one_visible_gpu_for_each_rank_is_no_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(monkeypatch, 1, 3, 4) == ("cpu:auto,cuda:nccl", 0)


def test_no_gpu_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankError, match=r"sees no GPU .*or device_type='cpu'"):
        choose(monkeypatch, 0, 0, 1)


def test_a_rank_without_a_gpu_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    seen: dict[int, str] = {}
    lock = threading.Lock()

    def body() -> None:
        rank = dist.get_rank()
        driver = HostDriver(HostMachine(1 if rank == 0 else 0))
        with pytest.raises(dist.DistBackendError) as refused:
            cuda_devices.choose_cuda_device(current_world(), driver)
        with lock:
            seen[rank] = str(refused.value)

    run_ranks(body, 2)
    assert "another rank has no usable GPU" in seen[0]
    assert "this process sees no GPU" in seen[1]


def test_a_cuda_mesh_without_cupy_or_a_driver_says_what_to_do() -> None:
    try:
        from transport._cuda import cuda_driver

        cuda_driver().device_count()
    except dist.DistBackendError:
        with pytest.raises(RankError, match=r"pip install|NVIDIA driver|no GPU is visible"):
            run_ranks(lambda: dist.init_device_mesh("cuda", (2,)), 2)
    else:
        pytest.skip("there is a GPU here")


def test_every_group_has_a_backend_for_the_cpu() -> None:
    assert list(parse_backend("nccl")) == ["cuda", "cpu"]
    assert parse_backend("cpu:tcp,cuda:nccl") == {"cpu": "tcp", "cuda": "nccl"}
    assert parse_backend("cuda:staged")["cuda"] == "staged"
    assert parse_backend("cpu:auto,cuda:auto")["cuda"] == "nccl"


def test_one_mesh_takes_both_kinds_of_array() -> None:
    def body() -> None:
        mesh = dist.init_device_mesh("cpu", (2,), backend="cpu:inproc,cuda:staged")
        x = np.ones(3)
        assert (mesh.all_reduce(x) == 2).all()
        from tests.support.gpu import fake_gpu

        y = fake_gpu.array(HostDriver(), np.ones(3, np.float32))
        mesh.all_reduce(y)
        assert (y.get() == 2).all()
        assert mesh.get_group().backend == "cpu:inproc,cuda:staged"

    run_ranks(body, 2)
