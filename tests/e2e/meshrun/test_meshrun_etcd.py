"""``meshrun --rdzv etcd://...``: the job outlives each of its nodes. Needs an etcd (test-etcd)."""

from __future__ import annotations

import signal

import pytest
from etcd_server import EtcdServer

from transport._store.etcd.store import EtcdStore

pytestmark = pytest.mark.processes

ELASTIC = """
import os, sys, time
import numpy as np
import meshlib as dist
from parallel.elastic import ElasticMesh

dist.init_process_group(timeout=60)
mesh = dist.init_device_mesh("cpu", (-1,), mesh_dim_names=("dp",))
me, until = int(os.environ["RANK"]), int(sys.argv[1])
with ElasticMesh(mesh, "dp", min_size=int(sys.argv[2])) as elastic:
    state = {"sum": np.zeros(3)}
    for step in elastic.steps(state, until):
        with step as mesh:
            if me == 0 and step.number == 3:
                open(f"pid-{os.getppid()}", "w").close()
                time.sleep(100)  # until the test kills this node
            gradient = mesh.all_reduce(np.full(3, step.number + 1.0))
            step.on_commit(lambda: np.add(state["sum"], gradient, out=state["sum"]))
    print(me, os.environ["GROUP_RANK"], elastic.mesh.mesh.tolist(), flush=True)
"""
QUICK = ("--rdzv-conf", "heartbeat_timeout=2")


def left_in(etcd: EtcdServer, url: str) -> list[str]:
    with EtcdStore(url, tls=None) as root:
        return root.list_keys()


@pytest.fixture
def job(meshrun, etcd):
    """Return what starts a node of one job, whose keys are gone at the end."""
    url = etcd.url()

    def start(script, *options):
        program, *arguments = [script] if isinstance(script, str) else script
        path = meshrun.script(program)
        return meshrun.start("--rdzv", url, *QUICK, *options, path, *arguments)

    start.url = url
    return start


def test_the_node_of_the_first_agent_is_lost_alone(meshrun, job, etcd):
    script = (ELASTIC, "12", "2")
    options = ("--nnodes=3", "--on-failure", "continue")
    first = job(script, *options)
    nodes = [first, *(job(script, *options) for _ in range(2))]
    assert meshrun.wait_for(lambda: [*meshrun.folder.glob("pid-*")])
    (path,) = meshrun.folder.glob("pid-*")
    leader = next(node for node in nodes if node.pid == int(path.name.partition("-")[2]))
    leader.send_signal(signal.SIGKILL)  # its ranks end with it
    done = {node.pid: meshrun.finish(node, 60.0) for node in nodes}
    assert done.pop(leader.pid).code == -signal.SIGKILL
    assert [one.code for one in done.values()] == [0, 0], [one.err for one in done.values()]
    assert sorted(one.out for one in done.values()) == ["1 1 [1, 2]\n", "2 2 [1, 2]\n"]
    assert left_in(etcd, job.url) == []
