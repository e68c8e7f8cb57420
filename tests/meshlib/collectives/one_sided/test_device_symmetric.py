"""Symmetric memory on devices, over a device that is made of host memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib._collectives import symmetric
from meshlib.testing import run_ranks
from tests.support.gpu import fake_gpu
from tests.support.gpu.host_driver import HostDriver, HostMachine

N = 3


class CountingDriver(HostDriver):
    """Counts what a call on memory of which nothing is known asks the driver."""

    queries = 0

    def share(self, pointer: int) -> tuple[bytes, int]:
        self.queries += 1
        return super().share(pointer)

    def open(self, handle: bytes, device: int) -> int:
        self.queries += 1
        return super().open(handle, device)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    def run(body: Any, backend: str = "cpu:inproc,cuda:cuda_ipc", devices: int = 1) -> list[Any]:
        machine = HostMachine(devices)
        own = threading.local()
        monkeypatch.setattr(symmetric, "cuda_driver", lambda: own.driver)

        def rank() -> Any:
            own.driver = CountingDriver(machine)
            return body(own.driver)

        return run_ranks(rank, N, backend=backend)

    return run


def group() -> Any:
    return dist.new_group()


def test_calls_on_it_and_on_parts_of_it_ask_the_driver_nothing(run: Callable[..., Any]) -> None:
    def body(driver: CountingDriver) -> None:
        rank, members = dist.get_rank(), group()
        x = members.empty((4, 100), np.float32, device="cuda")
        assert x.shape == (4, 100)
        assert x.dtype == np.float32
        x[...] = rank
        members.all_reduce(x)
        assert (x.get() == 3).all()
        known = driver.queries
        x.add(1)
        members.all_reduce(x)
        assert (x.get() == 12).all()
        # Another part on each rank.
        start = x.memory.pointer + 400 * rank
        part = driver.array(start, (50,), np.dtype(np.float32), 0, x)
        part[...] = rank
        members.all_reduce(part)
        assert (part.get() == 3).all()
        assert driver.queries == known
        ordinary = fake_gpu.array(driver, np.ones(8, np.float32))
        members.all_reduce(ordinary)
        assert driver.queries > known

    run(body)


def test_an_ordinary_array_on_one_member_is_as_good(run: Callable[..., Any]) -> None:
    def body(driver: CountingDriver) -> None:
        members = group()
        x = members.empty(10, np.int64, device="cuda:0")
        if dist.get_rank() == 1:
            x = fake_gpu.empty(driver, (10,), np.int64)
        x[...] = 7
        members.all_reduce(x)
        assert (x.get() == 7 * N).all()

    run(body)


def test_memory_is_used_again_once_it_is_free_everywhere(run: Callable[..., Any]) -> None:
    together = threading.Barrier(N, timeout=30)

    def body(driver: CountingDriver) -> None:
        members = group()
        first = members.empty(1000, np.float32, device="cuda")
        start, kept = first.memory.pointer, first
        if dist.get_rank() != 0:
            kept = None
        del first
        gc.collect()
        together.wait()
        second = members.empty(1000, np.float32, device="cuda")
        assert second.memory.pointer != start  # rank 0 still has the first one
        del kept
        gc.collect()
        together.wait()
        third = members.empty(990, np.float32, device="cuda")
        assert third.memory.pointer == start  # of the same capacity
        third[...] = 1
        second[...] = 2
        members.all_reduce(third)
        members.all_reduce(second)
        assert (third.get() == N).all()
        assert (second.get() == 2 * N).all()

    run(body)


def test_other_backends_give_ordinary_arrays(run: Callable[..., Any]) -> None:
    def body(driver: CountingDriver) -> None:
        x = group().empty((2, 3), np.float64, device="cuda")
        x[...] = 1
        dist.all_reduce(x)
        assert (x.get() == N).all()

    run(body, backend="inproc")


def test_members_that_ask_for_different_arrays_are_told(run: Callable[..., Any]) -> None:
    def body(driver: CountingDriver) -> None:
        members = group()
        device = "cuda" if dist.get_rank() else "cpu"
        with pytest.raises(ValueError, match=r"rank 0: shape \(4,\), dtype float32\n.*on a GPU"):
            members.empty(4, device=device)
        x = members.empty(4, device="cuda")
        assert x.shape == (4,)

    run(body)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:0", "cuda:1", 3])
def test_a_device_that_is_none_is_refused(run: Callable[..., Any], device: Any) -> None:
    def body(driver: CountingDriver) -> None:
        with pytest.raises(ValueError, match="device is "):
            group().empty(4, device=device)

    run(body)
