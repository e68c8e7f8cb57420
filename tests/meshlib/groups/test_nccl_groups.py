"""Groups whose arrays travel by NCCL: what users see of it, over a fake NCCL that hangs and never
tells why, as NCCL does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from meshlib._calls.call_queue import CallQueue
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._job.current import current_world
from meshlib._job.starting import gpu as cuda_devices
from meshlib._mesh import init as init_mesh
from meshlib.testing import run_ranks
from tests.support.gpu import fake_gpu
from tests.support.gpu.fake_nccl import FakeNccl
from tests.support.gpu.host_driver import HostDriver, HostMachine

N = 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run ``body(driver)`` on ranks that have a device each."""

    def run(body: Any, n: int = N, call_timeout: float | None = None) -> list[Any]:
        machine = HostMachine(n)
        monkeypatch.setattr(
            "transport._nccl.communicator.load_nccl", lambda: FakeNccl(HostDriver(machine))
        )

        def rank() -> Any:
            driver = HostDriver(machine)
            driver.choose_device(dist.get_rank())
            return body(driver)

        return run_ranks(rank, n, backend="cpu:inproc,cuda:nccl", call_timeout=call_timeout)

    return run


def array(driver: HostDriver, values: Any) -> fake_gpu.FakeArray:
    return fake_gpu.array(driver, values, dist.get_rank())


def test_collectives(run: Callable[..., Any]) -> None:
    def body(driver: HostDriver) -> None:
        x = array(driver, np.full(5, dist.get_rank(), np.float32))
        assert dist.all_reduce(x) is x
        x.add(0.5)
        assert (x.get() == 3.5).all()
        y = array(driver, np.full(5, dist.get_rank(), np.int32))
        dist.all_reduce(y, dist.ReduceOp.BOR)  # NCCL has no such thing
        assert (y.get() == 3).all()

    run(body)


def mismatch_of(run: Callable[..., Any], call: Callable[[HostDriver], Any]) -> list[str]:
    """Make a good call, then ``call``, which differs by rank; return what each rank is told."""
    together = threading.Barrier(N, timeout=30)

    def body(driver: HostDriver) -> str:
        dist.all_reduce(array(driver, np.ones(4, np.float32)))
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            call(driver).wait(60.0)  # issuing it may go well: who waits for its end is told
        with pytest.raises(dist.CollectiveMismatchError):
            dist.all_reduce(array(driver, np.ones(4, np.float32)))
        together.wait()
        return str(caught.value)

    return run(body)


def test_members_that_disagree_all_get_the_table(run: Callable[..., Any]) -> None:
    def call(driver: HostDriver) -> Any:
        count = 4 if dist.get_rank() != 1 else 7
        return dist.all_reduce(array(driver, np.ones(count, np.float32)), async_op=True)

    for message in mismatch_of(run, call):
        assert "made different calls (#2 of this group)" in message
        assert "count=7" in message
        assert message.count("count=4") >= 2
        assert "test_nccl_groups.py" in message


def test_members_in_different_collectives_are_told(run: Callable[..., Any]) -> None:
    def call(driver: HostDriver) -> Any:
        x = array(driver, np.ones(4, np.float32))
        if dist.get_rank() == 2:
            return dist.broadcast(x, 0, async_op=True)
        return dist.all_reduce(x, async_op=True)

    for message in mismatch_of(run, call):
        assert "all_reduce" in message
        assert "broadcast" in message


def test_a_call_by_way_of_the_host_meets_one_of_nccls(run: Callable[..., Any]) -> None:
    def call(driver: HostDriver) -> Any:
        x = array(driver, np.ones(4, np.int32))
        op = dist.ReduceOp.BXOR if dist.get_rank() == 0 else dist.ReduceOp.SUM
        return dist.all_reduce(x, op, async_op=True)

    for message in mismatch_of(run, call):
        assert "op=BXOR" in message
        assert "op=SUM" in message


def test_sizes_that_do_not_fit_together_are_told(run: Callable[..., Any]) -> None:
    """They are in no header: each member knows its own alone."""

    def call(driver: HostDriver) -> Any:
        sizes = [2] * N if dist.get_rank() else [2, 3, 2]
        ins = [array(driver, np.ones(n, np.float32)) for n in sizes]
        outs = [fake_gpu.empty(driver, (2,), np.float32, dist.get_rank()) for _ in range(N)]
        return dist.all_to_all(outs, ins, async_op=True)

    for message in mismatch_of(run, call):
        assert "rank 0 has 12 bytes for rank 1, which expects 8" in message


def test_many_calls_ahead_are_compared_in_the_end(run: Callable[..., Any]) -> None:
    """One member issues all its calls before another has made one; the last one differs."""
    first = threading.Event()

    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()
        x = array(driver, np.ones(4, np.float32))
        dist.all_reduce(x)
        if rank == 0:
            assert first.wait(60)
        works = [dist.all_reduce(x, async_op=True) for _ in range(40)]
        odd = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
        works.append(dist.all_reduce(x, odd, async_op=True))
        if rank == 1:
            first.set()
        with pytest.raises(dist.CollectiveMismatchError, match="#42 of this group"):
            works[-1].wait(60.0)

    run(body, 2)


def test_a_member_that_does_not_come_is_named(run: Callable[..., Any]) -> None:
    gate = threading.Barrier(2, timeout=60)

    def body(driver: HostDriver) -> None:
        x = array(driver, np.ones(4, np.float32))
        dist.all_reduce(x)
        if dist.get_rank() == 0:
            work = dist.new_group(timeout=30).all_reduce(x, async_op=True, timeout=0.5)
            with pytest.raises(dist.CollectiveTimeoutError, match="rank 1 has not arrived"):
                work.wait(60.0)
        gate.wait()

    run(body, 2)


def test_groups_end_without_a_call_too_many(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving right after an asynchronous call keeps nobody from comparing it."""
    # Nor from making it, however late: who leaves waits for all, but not for longer than this.
    monkeypatch.setattr(CallQueue.close, "__defaults__", (60.0,))
    monkeypatch.setattr("transport._nccl.communicator.CLOSE_SECONDS", 60.0)

    def body(driver: HostDriver) -> None:
        x = array(driver, np.ones(4, np.float32))
        group = dist.new_group()
        group.all_reduce(x, async_op=True)
        dist.destroy_process_group(group)
        assert (x.get() == N).all()

    before = set(threading.enumerate())
    run(body)
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if "comparer" in name], left


@pytest.fixture
def run_bound(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run ``body(driver)`` on ranks that have a device each, bound as by ``device_id``.

    Returns for each rank how many NCCL communicators were connected anew, and how many there are.
    """

    def run(body: Any, n: int, version: int = 22703) -> list[tuple[int, int]]:
        machine = HostMachine(n)
        own = threading.local()

        def load_nccl() -> FakeNccl:
            return own.nccl

        monkeypatch.setattr("transport._nccl.communicator.load_nccl", load_nccl)
        monkeypatch.setattr(init_mesh, "cuda_driver", lambda: own.driver)
        monkeypatch.setattr(cuda_devices, "cuda_driver", lambda: own.driver)
        monkeypatch.setattr("transport._nccl.library.has_provider", lambda: True)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

        def rank() -> tuple[int, int]:
            driver = own.driver = HostDriver(machine)
            library = own.nccl = FakeNccl(driver, version)
            cuda_devices.bind_cuda_device(current_world(), f"cuda:{dist.get_rank()}")
            assert driver.current_device() == dist.get_rank()
            body(driver)
            return library.joins, len(library.comms)

        return run_ranks(rank, n, backend="cpu:inproc,cuda:nccl")

    return run


def use_mesh(driver: HostDriver) -> None:
    mesh = dist.init_device_mesh(
        "cuda", (2, 2), mesh_dim_names=("dp", "tp"), backend="cpu:inproc,cuda:nccl"
    )
    rank = dist.get_rank()
    x = array(driver, np.full(3, 10**rank, np.int64))
    mesh["tp"].all_reduce(x)
    assert (x.get() == (11 if rank < 2 else 1100)).all()
    mesh["dp"].all_reduce(x)
    assert (x.get() == 1111).all()
    mesh.all_reduce(x)
    assert (x.get() == 4444).all()


def test_the_groups_of_a_mesh_are_split_from_the_default_one(
    run_bound: Callable[..., Any],
) -> None:
    assert run_bound(use_mesh, 4) == [(1, 3)] * 4


def test_an_nccl_that_cannot_split_connects_each_group(run_bound: Callable[..., Any]) -> None:
    assert run_bound(use_mesh, 4, 21703) == [(3, 3)] * 4


def test_split_group_splits_and_leaves_others_out(run_bound: Callable[..., Any]) -> None:
    def body(driver: HostDriver) -> None:
        rank = dist.get_rank()
        part = dist.split_group(split_ranks=[[2, 0], [3]])
        x = array(driver, np.full(3, rank, np.float32))
        if rank == 1:
            assert part is None
        else:
            assert part is not None
            part.all_reduce(x)
            assert (x.get() == {0: 2, 2: 2, 3: 3}[rank]).all()
        dist.all_reduce(x)

    assert run_bound(body, 4) == [(1, 2), (1, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("wrong", ["cuda:9", "gpu", -1, "cuda:x", 1.5])
def test_a_device_id_that_is_none_is_refused(wrong: Any) -> None:
    def body() -> None:
        with pytest.raises(ValueError, match=r"device_id is .*; expected (one|the number) of"):
            cuda_devices.bind_cuda_device(current_world(), wrong, HostDriver(HostMachine(2)))
        assert current_world().cuda_device is None

    run_ranks(body, 1)


def test_who_comes_when_a_member_has_given_up_and_left_is_told_at_once(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its array would stay as it is: the call cannot be made without that member any more."""
    monkeypatch.setattr("transport._nccl.communicator.CLOSE_SECONDS", 0.1)

    def body(driver: HostDriver) -> None:
        group = current_world().default_group
        dist.all_reduce(array(driver, np.ones(4, np.float32)))
        x = array(driver, np.full(4, dist.get_rank() + 1, np.float32))
        if dist.get_rank() == 0:
            dist.all_reduce(x, async_op=True)
            dist.destroy_process_group()
            return
        while not call_queue_of(group).state.communicators["cuda"]._lost:
            time.sleep(0.001)
        with pytest.raises(dist.RankFailedError, match="rank 0"):
            dist.all_reduce(x)
        assert (x.get() == 2).all()

    run(body, 2)
