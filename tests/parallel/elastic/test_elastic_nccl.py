"""Going on without lost ranks where arrays travel by NCCL: over a fake one, which hangs, too."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import meshlib as dist
from meshlib._job.current import current_world
from parallel.elastic import ElasticMesh
from tests.support.gpu import fake_gpu
from tests.support.gpu.fake_nccl import FakeNccl
from tests.support.gpu.host_driver import HostDriver, HostMachine
from tests.support.parallel.elastic_ranks import ThreadJob

N, BACKEND = 3, "cpu:inproc,cuda:nccl"


@pytest.fixture
def machine(monkeypatch):
    """As many devices as there are ever ranks; each rank that begins has the next one."""
    machine = HostMachine(N + 1)
    monkeypatch.setattr(
        "transport._nccl.communicator.load_nccl", lambda: FakeNccl(HostDriver(machine))
    )
    return machine


def on_device(machine):
    """Choose this rank's device; return what makes an array of three values there."""
    driver, rank = HostDriver(machine), current_world().rank
    driver.choose_device(rank)
    return lambda value: fake_gpu.array(driver, np.full(3, value, np.float32), rank)


def test_a_call_that_a_lost_rank_hangs_is_aborted_and_the_others_connect_anew(machine):
    first_is_over = threading.Barrier(N, timeout=60)

    def program(job):
        array = on_device(machine)
        me = dist.get_rank()
        assert (dist.all_reduce(array(me)).get() == 3).all()
        first_is_over.wait()
        if me == 1:
            job.kill()
        with pytest.raises(dist.RankFailedError, match="rank 1 was killed"):
            dist.all_reduce(array(1.0), async_op=True).wait(30.0)
        group = dist.shrink_group([])
        total = array(me)
        group.all_reduce(total)
        group.broadcast(total, group_src=0)
        return dist.get_world_size(), total.get().tolist()

    assert ThreadJob(program, N, backend=BACKEND).join() == dict.fromkeys((0, 2), (2, [2.0] * 3))


def test_steps_go_on_and_another_rank_comes(machine):
    def program(job):
        array = on_device(machine)
        me = current_world().rank
        mesh = dist.init_device_mesh("cpu", (N,), mesh_dim_names=("dp",))
        with ElasticMesh(mesh, "dp", min_size=N, timeout=job.timeout) as elastic:
            state = {"sum": np.zeros(3)}
            for step in elastic.steps(state, 6):
                with step as mesh:
                    gradient = array(step.number + 1.0)
                    if (me, step.number) == (1, 3):
                        job.start()
                        job.kill()
                    mesh.all_reduce(gradient, dist.ReduceOp.AVG)
                    step.on_commit(np.add, state["sum"], gradient.get(), out=state["sum"])
            return elastic.mesh.mesh.tolist(), state["sum"].tolist()

    results = ThreadJob(program, N, backend=BACKEND).join()
    assert results == dict.fromkeys((0, 2, 3), ([0, 3, 2], [21.0] * 3))
