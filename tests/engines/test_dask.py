"""Under a Dask cluster of two worker processes: ``make test-dask``."""

from __future__ import annotations

import os

import numpy as np
import pytest

distributed = pytest.importorskip("distributed", reason="needs Dask: make test-dask")

from meshlib.engines.dask import run  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as made,
    ):
        yield made


def work(fails: str = ""):
    import meshlib as dist

    rank = dist.get_rank()
    x = np.array([rank + 1.0])
    dist.all_reduce(x)
    if fails == "raise" and rank == 1:
        raise ValueError("the cause")
    if fails == "kill" and rank == 1:
        os._exit(9)
    if fails:
        dist.all_reduce(x)
    return rank, dist.get_world_size(), dist.get_node_local_rank(), x[0]


def mesh_names():
    import meshlib as dist

    mesh = dist.init_device_mesh()
    return mesh.mesh_dim_names, mesh.shape, "MASTER_ADDR" in os.environ


def test_one_task_a_worker(client):
    assert run(client, work) == [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]


def test_again_in_the_same_workers(client):
    pids = [run(client, os.getpid) for _ in range(2)]
    assert pids[0] == pids[1]
    assert len(set(pids[0])) == 2


def test_some_of_the_workers(client):
    chosen = sorted(client.scheduler_info()["workers"])[:1]
    assert run(client, work, workers=chosen) == [(0, 1, 0, 1.0)]


def test_a_mesh(client):
    assert run(client, mesh_names, mesh="dp=2") == [(("dp",), (2,), True)] * 2
    with pytest.raises(ValueError, match="3"):
        run(client, mesh_names, mesh="dp=3")


def test_variables_do_not_outlive_a_run(client):
    run(client, work)
    left = client.run(lambda: [name for name in os.environ if name in ("RANK", "MESHLIB_SECRET")])
    assert all(names == [] for names in left.values())


def test_the_cause_comes_back_and_not_its_echo(client):
    with pytest.raises(ValueError, match="the cause"):
        run(client, work, "raise")
    assert len(run(client, work)) == 2


def test_a_killed_worker(client):
    with pytest.raises(Exception, match=r"rank 1|KilledWorker|died"):
        run(client, work, "kill", timeout=60)
    client.wait_for_workers(2, timeout=60)
    assert len(run(client, work)) == 2  # Dask has made another worker


def test_workers_that_are_unknown(client):
    with pytest.raises(ValueError, match="are not in the cluster"):
        run(client, work, workers=["tcp://nowhere:1"])


def test_workers_with_threads():
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as client,
        pytest.raises(ValueError, match="several threads"),
    ):
        run(client, work)
