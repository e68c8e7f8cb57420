"""``meshrun --rdzv etcd://...``: the job outlives each of its nodes. Needs an etcd (test-etcd)."""

from __future__ import annotations

import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from meshlib._events.log import LogReader
from meshlib._launcher.nodes.records import LOG, Knock, parse
from tests.support.net.etcd_server import EtcdServer, etcd_of
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
LOST_SOON = ("--rdzv-conf", "heartbeat_timeout=5")
"""For tests of what follows a silence. Shorter ones come by themselves on a busy machine."""


def left_in(etcd: EtcdServer, url: str) -> list[str]:
    with EtcdStore(url, tls=None) as root:
        return root.list_keys()


def knocks(store: EtcdStore) -> int:
    """Return how many agents have asked whether the job in ``store`` is alive."""
    return sum(isinstance(record, Knock) for record in LogReader(store, LOG, parse).read(0.0))


@pytest.fixture
def job(meshrun, etcd):
    """Return what starts a node of one job, whose keys are gone at the end."""
    url = etcd.url()

    def start(script, *options):
        program, *arguments = [script] if isinstance(script, str) else script
        path = meshrun.script(program)
        return meshrun.start("--rdzv", url, *options, path, *arguments)

    start.url = url
    return start


def wait_for_files(meshrun, nodes, pattern, count):
    """Wait until ranks have made ``count`` files; fail with the words of a launcher that ends."""
    found = lambda: len([*meshrun.folder.glob(pattern)]) == count  # noqa: E731
    ended = lambda: [node for node in nodes if node.poll() is not None]  # noqa: E731
    meshrun.wait_for(lambda: found() or ended())
    if not found():
        words = [meshrun.finish(node) for node in ended()]
        for node in nodes:
            if node.poll() is None:
                node.kill()
                words.append(meshrun.finish(node))
        raise AssertionError(words)


def first_of(meshrun, nodes):
    """Return the launcher of rank 0, which leads, once that rank waits for its end."""
    wait_for_files(meshrun, nodes, "pid-*", 1)
    (path,) = meshrun.folder.glob("pid-*")
    return next(node for node in nodes if node.pid == int(path.name.partition("-")[2]))


def test_the_node_of_the_first_agent_is_lost_alone(meshrun, job, etcd):
    script = (ELASTIC, "12", "2")
    options = (*LOST_SOON, "--nnodes=3", "--on-failure", "continue")
    nodes = [job(script, *options) for _ in range(3)]
    leader = first_of(meshrun, nodes)
    leader.send_signal(signal.SIGKILL)  # its ranks end with it
    done = {node.pid: meshrun.finish(node) for node in nodes}
    assert done.pop(leader.pid).code == -signal.SIGKILL
    assert [one.code for one in done.values()] == [0, 0], [one.err for one in done.values()]
    assert sorted(one.out for one in done.values()) == ["1 1 [1, 2]\n", "2 2 [1, 2]\n"]
    assert left_in(etcd, job.url) == []


def test_another_node_comes_for_the_first_which_was_drained(meshrun, job, etcd):
    script = (ELASTIC, "12", "3")
    nodes = [job(script, "--nnodes=3", "--on-failure", "continue") for _ in range(3)]
    leader = first_of(meshrun, nodes)
    leader.send_signal(signal.SIGTERM)
    nodes.remove(leader)
    assert meshrun.finish(leader).code == 128 + signal.SIGTERM
    nodes.append(job(script, "--nnodes=3", "--on-failure", "continue"))  # of the new leader
    done = [meshrun.finish(node) for node in nodes]
    assert [one.code for one in done] == [0, 0, 0], [one.err for one in done]
    assert sorted(one.out[:4] for one in done) == ["1 1 ", "2 2 ", "3 3 "]
    assert left_in(etcd, job.url) == []


FOREVER = """
import os, time
import numpy as np
import meshlib as dist

dist.init_process_group(timeout=60)
attempt = os.environ["MESHLIB_RESTART_COUNT"]
dist.all_reduce(np.ones(4))
open(f"attempt-{attempt}-node-{os.environ['GROUP_RANK']}-{os.getppid()}", "w").close()
seen = np.zeros(1)
while not seen[0]:  # all ranks leave at the same step, whichever of them sees the file first
    time.sleep(0.01)
    seen[0] = os.path.exists("enough")
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
dist.barrier()
print(attempt, dist.get_world_size(), flush=True)
"""


def node_zero(meshrun, nodes, attempt=0):
    """Return the launcher of the first node, which leads, once all ranks run."""
    wait_for_files(meshrun, nodes, f"attempt-{attempt}-*", len(nodes))
    (path,) = meshrun.folder.glob(f"attempt-{attempt}-node-0-*")
    return next(node for node in nodes if node.pid == int(path.name.rpartition("-")[2]))


def test_a_job_that_restarts_does_so_without_the_agent_that_led(meshrun, job, etcd):
    options = (*LOST_SOON, "--nnodes=2:3", "--max-restarts=1")
    nodes = [job(FOREVER, *options) for _ in range(3)]
    leader = node_zero(meshrun, nodes)
    leader.send_signal(signal.SIGKILL)
    nodes.remove(leader)
    assert meshrun.finish(leader).code == -signal.SIGKILL
    node_zero(meshrun, nodes, attempt=1)
    (meshrun.folder / "enough").touch()
    done = [meshrun.finish(node) for node in nodes]
    assert [(one.code, one.out) for one in done] == [(0, "1 2\n")] * 2, [one.err for one in done]
    assert "is lost" in done[0].err or "sent no heartbeat for 5 s" in done[0].err
    assert left_in(etcd, job.url) == []


def test_a_new_job_begins_where_all_agents_were_killed(meshrun, job, etcd):
    """It begins as soon as the lease has ended: this test ends it, instead of time."""
    late = ("--rdzv-conf", "heartbeat_timeout=60")
    killed = [job(FOREVER, *late, "--nnodes=2") for _ in range(2)]
    node_zero(meshrun, killed)
    for node in killed:
        node.send_signal(signal.SIGKILL)
        meshrun.finish(node)
    for path in meshrun.folder.glob("attempt-*"):
        path.unlink()
    with EtcdStore(job.url, tls=None) as root:
        lease = int(root.get("job"))
        with root.leased(lease, f"job-{lease:x}") as left:
            before = knocks(left)
            nodes = [job(FOREVER, "--nnodes=2") for _ in range(2)]
            assert meshrun.wait_for(lambda: knocks(left) == before + len(nodes))
            assert not [*meshrun.folder.glob("attempt-*")]
            left.revoke()
    node_zero(meshrun, nodes)
    (meshrun.folder / "enough").touch()
    done = [meshrun.finish(node) for node in nodes]
    assert [(one.code, one.out) for one in done] == [(0, "0 2\n")] * 2, [one.err for one in done]
    assert left_in(etcd, job.url) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_job_that_is_told_to_end(meshrun, job, etcd, number):
    nodes = [job(FOREVER, "--nnodes=2") for _ in range(2)]
    node_zero(meshrun, nodes).send_signal(number)
    assert all(meshrun.finish(node).code for node in nodes)
    assert left_in(etcd, job.url) == []


def test_a_job_ends_with_its_etcd(meshrun, tmp_path):
    with etcd_of(tmp_path) as cluster:
        url, path = cluster.url(), meshrun.script(FOREVER)
        nodes = [meshrun.start("--rdzv", url, *LOST_SOON, "--nnodes=2", path) for _ in range(2)]
        node_zero(meshrun, nodes)
        cluster.kill(0)
        done = [meshrun.finish(node) for node in nodes]
    assert [one.code for one in done] == [1, 1]
    assert all(f"{cluster.hosts[0]}: Connection refused" in one.err for one in done), done


def test_a_node_that_finds_no_etcd_says_so(meshrun, free_port):
    result = meshrun.run(
        *("--rdzv", f"etcd://127.0.0.1:{free_port}/job", "--nnodes=2"),
        *("--rdzv-conf", "join_timeout=0.5", meshrun.script(FOREVER)),
    )
    assert result.code == 1
    assert f"EtcdStore(etcd://127.0.0.1:{free_port}/job): no answer to reading 'job'" in result.err
    assert "Connection refused" in result.err


def test_a_launcher_that_etcd_refuses_says_so_at_once(meshrun):
    class Refusing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            text = b'{"code": 3, "message": "authentication failed"}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"etcd://me:my-secret@127.0.0.1:{server.server_port}/job"
        result = meshrun.run("--rdzv", url, "--nnodes=2", meshrun.script(FOREVER))
        server.shutdown()
        thread.join()
    assert result.code == 1
    assert "refused the password of user 'me': authentication failed" in result.err
    assert "my-secret" not in result.err
