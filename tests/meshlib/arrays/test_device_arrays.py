"""Arrays in device memory through every floor, on a device that is made of host memory.

Nothing is done on that device before somebody asks for the end of something, and then in a random
order: what the library leaves unordered comes out wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib.testing import RankError, run_ranks
from tests.support.gpu import fake_gpu
from tests.support.gpu.host_driver import HostDriver, HostMachine

N = 3
SEEDS = range(4)


def run(
    body: Any, n: int = N, seed: int = 0, devices: int = 1, backend: str = "inproc"
) -> list[Any]:
    """Run ``body(driver)`` on ``n`` ranks that share one machine."""
    machine = HostMachine(devices, seed)
    return run_ranks(lambda: body(HostDriver(machine)), n, backend=backend)


@pytest.mark.parametrize("backend", ["inproc", "cpu:inproc,cuda:cuda_ipc"])
@pytest.mark.parametrize("seed", SEEDS)
def test_collectives_wait_for_the_arrays_stream_and_later_work_for_them(
    seed: int, backend: str
) -> None:
    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()
        stream = driver.create_stream(0)
        with driver.on(0, stream):
            x = fake_gpu.array(driver, np.zeros(1000, np.float32))
            x.add(rank + 1)  # not done yet when the call is issued
            assert dist.all_reduce(x) is x
            x.add(0.5)  # must come after the sum
            assert (x.get() == 6.5).all()
            y = fake_gpu.array(driver, np.full((2, 3), rank, np.int64))
            dist.broadcast(y, src=1)
            assert (y.get() == 1).all()
            out = fake_gpu.empty(driver, (N, 2, 3), np.int64)
            y.add(rank)
            dist.all_gather_into_tensor(out, y)
            assert (out.get() == np.arange(1, N + 1).reshape(N, 1, 1)).all()
            part = fake_gpu.empty(driver, (2, 3), np.int64)
            dist.reduce_scatter_tensor(part, out)
            assert (part.get() == N * (rank + 1)).all()

    run(body, seed=seed, backend=backend)


@pytest.mark.parametrize("seed", SEEDS)
def test_async_calls_hold_the_waiters_stream_only(seed: int) -> None:
    def body(driver: HostDriver) -> None:
        issuing, waiting = driver.create_stream(0), driver.create_stream(0)
        with driver.on(0, issuing):
            x = fake_gpu.array(driver, np.ones(64, np.float64))
            work = dist.all_reduce(x, async_op=True)
        with driver.on(0, waiting):
            assert work.wait()
            x.add(1)
            assert (x.get() == N + 1).all()
            assert work.is_completed()
            assert work.is_success()
            assert work.result() is x

    run(body, seed=seed)


def test_wait_with_a_timeout_waits_for_the_device_on_the_host() -> None:
    def body(driver: HostDriver) -> None:
        x = fake_gpu.array(driver, np.ones(8, np.float32))
        work = dist.all_reduce(x, async_op=True)
        assert work.wait(60.0)
        assert work.is_completed()
        assert (x.view() == N).all()

    run(body)


def test_a_device_that_never_gets_there_ends_at_the_deadline() -> None:
    def body(driver: HostDriver) -> None:
        stream = driver.create_stream(0)
        with driver.on(0, stream):
            x = fake_gpu.array(driver, np.ones(8, np.float32))
        driver.machine.hold(stream)
        with driver.on(0, stream), pytest.raises(dist.DistBackendError, match="did not finish"):
            dist.new_group(timeout=0.2).all_reduce(x)
        driver.machine.release(stream)

    run(body, n=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_arrays_that_are_not_contiguous_go_through_a_copy(seed: int) -> None:
    def body(driver: HostDriver) -> None:
        values = np.arange(12, dtype=np.float32).reshape(3, 4) + dist.get_rank()
        x = fake_gpu.transposed(driver, values)
        dist.all_reduce(x)
        x.add(1)
        assert (x.get() == np.arange(12).reshape(3, 4) * N + 4).all()

    run(body, seed=seed)


def test_scalars_and_empty_arrays() -> None:
    def body(driver: HostDriver) -> None:
        x = fake_gpu.array(driver, np.float32(dist.get_rank()))
        dist.all_reduce(x)
        assert x.get() == 3
        dist.all_reduce(fake_gpu.array(driver, np.zeros((0, 4), np.float32)))

    run(body)


def test_messages() -> None:
    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()
        x = fake_gpu.array(driver, np.zeros(5, np.int32))
        x.add(rank)
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            got = fake_gpu.empty(driver, (5,), np.int32)
            assert dist.recv(got, 0) == 0
            got.add(7)
            assert (got.get() == 7).all()

    run(body, n=2)


def test_coalesced_calls() -> None:
    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()
        xs = [fake_gpu.array(driver, np.full(n, rank, np.float32)) for n in (3, 0, 5)]
        for x, got in zip(xs, dist.all_reduce_coalesced(xs), strict=True):
            assert got is x
            assert (x.get() == 3).all()
        ys = [fake_gpu.array(driver, np.full(n, rank, np.float32)) for n in (2, 3)]
        outs = [[fake_gpu.empty(driver, y.shape, y.dtype) for y in ys] for _ in range(N)]
        dist.all_gather_coalesced(outs, ys)
        for i, row in enumerate(outs):
            for out in row:
                assert (out.get() == i).all()

    run(body)


@pytest.mark.parametrize("seed", SEEDS)
def test_coalesced_calls_on_arrays_that_are_not_contiguous(seed: int) -> None:
    """The copies back belong to the call's end, whatever its last array is like."""

    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()

        def array(value: int) -> fake_gpu.FakeArray:
            return fake_gpu.transposed(driver, np.full((3, 4), value, np.float32))

        def last(value: int) -> fake_gpu.FakeArray:
            return fake_gpu.array(driver, np.full(5, value, np.float32))

        xs = [array(rank), array(rank + 1), last(rank + 2)]
        work = dist.all_reduce_coalesced(xs, async_op=True)
        work.wait()
        assert [float(x.get().max()) for x in xs] == [3.0, 6.0, 9.0]
        outs = [[array(-1), last(-1)] for _ in range(N)]
        dist.all_gather_coalesced(outs, [array(rank), last(10 + rank)])
        got = [[float(x.get().max()) for x in row] for row in outs]
        assert got == [[r, 10 + r] for r in range(N)]

    run(body, seed=seed, backend="cpu:inproc,cuda:cuda_ipc")


def test_memory_lives_until_the_call_has_ended() -> None:
    """The device memory's own check finds any access after it was freed."""

    def body(driver: HostDriver) -> None:
        for _ in range(20):
            x = fake_gpu.array(driver, np.ones(64, np.float32))
            dist.all_reduce(x, async_op=True)
            del x
        y = fake_gpu.array(driver, np.ones(64, np.float32))
        dist.all_reduce(y)
        assert (y.get() == N).all()

    run(body)


@pytest.mark.parametrize("backend", ["inproc", "cpu:inproc,cuda:cuda_ipc"])
def test_memory_is_given_back_soon_after(backend: str) -> None:
    """The flight record has all these calls, and the Works are there still."""

    def body(driver: HostDriver) -> None:
        works = []
        for i in range(40):
            x = fake_gpu.transposed(driver, np.ones((4, 4), np.float32))
            if i % 2:
                dist.all_reduce(x)
            else:
                works.append(dist.all_reduce(x, async_op=True))
                works[-1].wait()
            assert (x.get() == N).all()
        del x
        assert all(work.is_completed() for work in works)
        dist.all_reduce(fake_gpu.array(driver, np.ones(2, np.float32)))
        dist.barrier()
        assert len(driver.machine.living()) < 40 * N

    run(body, backend=backend)


def test_host_and_device_arrays_do_not_mix_in_one_call() -> None:
    def body(driver: HostDriver) -> None:
        x = fake_gpu.array(driver, np.ones(2, np.float32))
        with pytest.raises(ValueError, match=r"out.* is on cpu but .*cuda:0"):
            dist.all_gather_into_tensor(np.empty(2 * N, np.float32), x)
        other = fake_gpu.empty(driver, (2 * N,), np.float32, device=1)
        with pytest.raises(ValueError, match=r"cuda:1 but .*cuda:0"):
            dist.all_gather_into_tensor(other, x)
        dist.barrier()

    run(body, devices=2)


def test_read_only_arrays_are_refused() -> None:
    def body(driver: HostDriver) -> None:
        x = fake_gpu.array(driver, np.ones(2, np.float32))
        x.writable = False
        with pytest.raises(TypeError, match="read-only"):
            dist.all_reduce(x)

    run(body, n=1)


def test_without_cupy_an_array_of_a_gpu_says_what_to_install() -> None:
    class Foreign:
        shape, dtype = (2,), np.dtype(np.float32)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"version": 3, "shape": (2,), "data": (4096, False)}

    def body(_: HostDriver) -> None:
        dist.all_reduce(Foreign())

    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(RankError, match=r"pip install 'meshlib-spmd\[cuda13\]'"):
            run(body, n=1)
    else:
        pytest.skip("CuPy is installed here")


def test_issuing_an_async_call_never_waits_for_the_device() -> None:
    def body(driver: HostDriver) -> None:
        stream = driver.create_stream(0)
        with driver.on(0, stream):
            x = fake_gpu.array(driver, np.ones(8, np.float32))
            driver.machine.hold(stream)
            work = dist.all_reduce(x, async_op=True)
            assert not work.is_completed()
            driver.machine.release(stream)
            work.wait()
            assert (x.get() == 1).all()

    run(body, n=1)
