"""Several nodes, played by several launchers on this machine, and by network namespaces."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import sys

import pytest

from transport._net import auth

pytestmark = pytest.mark.processes

MEET = """
    import os, sys
    import numpy as np
    import meshlib as dist

    dist.init_process_group()
    x = np.full(1000, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    dist.barrier()
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MESHLIB_RESTART_COUNT")
    print(int(x[0]), *(os.environ[name] for name in names))
"""
MEET_FOREVER = """
    import os, time
    import numpy as np
    import meshlib as dist

    dist.init_process_group()
    x = np.ones(1000)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        open("running", "w").close()
    while True:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        time.sleep(0.01)
"""


@pytest.fixture
def start_nodes(meshrun, free_port):
    """Start launchers that meet on loopback; each gets ``flags`` and its own of ``each``."""

    def start(script, *flags, each=((), ()), env=None, ranks=2):
        path = meshrun.script(script)
        address = ("--rdzv-endpoint", f"127.0.0.1:{free_port}", "--nproc-per-node", str(ranks))
        if not any(flag.startswith("--nnodes") for flag in flags):
            flags = (f"--nnodes={len(each)}", *flags)
        return [meshrun.start(*address, *flags, *own, path, env=env) for own in each]

    return start


def finish(meshrun, nodes, deadline=30.0):
    return [meshrun.finish(node, deadline) for node in nodes]


def wait_until_running(meshrun):
    assert meshrun.wait_for((meshrun.folder / "running").exists)


RANKED = (("--node-rank", "0"), ("--node-rank", "1"))


@pytest.mark.parametrize("each", [RANKED, RANKED[::-1]], ids=["first first", "first last"])
def test_nodes_with_ranks_meet(meshrun, start_nodes, each):
    results = finish(meshrun, start_nodes(MEET, each=each))
    assert [(result.code, result.err) for result in results] == [(0, ""), (0, "")]
    by_node = {
        flags[1]: result.out.splitlines() for flags, result in zip(each, results, strict=True)
    }
    assert sorted(by_node["0"]) == ["10 0 0 0 2 0", "10 1 1 0 2 0"]
    assert sorted(by_node["1"]) == ["10 2 0 1 2 0", "10 3 1 1 2 0"]


def test_nodes_meet_in_the_order_in_which_they_come(meshrun, start_nodes):
    results = finish(meshrun, start_nodes(MEET, each=((), (), ()), ranks=1))
    assert [result.code for result in results] == [0, 0, 0]
    lines = sorted(line for result in results for line in result.out.splitlines())
    assert lines == [f"6 {node} 0 {node} 3 0" for node in range(3)]


def test_nodes_that_know_the_same_secret_meet(meshrun, start_nodes):
    env = {"MESHLIB_SECRET": secrets.token_hex(32)}
    results = finish(meshrun, start_nodes(MEET, env=env, ranks=1))
    assert [(result.code, result.err) for result in results] == [(0, ""), (0, "")]


def test_a_node_with_another_secret_is_turned_away(meshrun, start_nodes, free_port):
    (first,) = start_nodes(
        MEET, "--nnodes=2", each=RANKED[:1], env={"MESHLIB_SECRET": secrets.token_hex(32)}
    )
    (second,) = start_nodes(
        MEET, "--nnodes=2", each=RANKED[1:], env={"MESHLIB_SECRET": secrets.token_hex(32)}
    )
    result = meshrun.finish(second)
    assert result.code == 1
    assert f"127.0.0.1:{free_port}" in result.err
    assert "another secret" in result.err
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    assert meshrun.finish(first).code == 130


NEWER = """
    import sys
    from transport._net import auth

    auth._VERSION += 1
    from meshlib._launcher.__main__ import main

    sys.exit(main())
"""


def test_a_node_with_another_version_of_the_protocol_is_turned_away(
    meshrun, start_nodes, free_port
):
    (first,) = start_nodes(MEET, "--nnodes=2", each=RANKED[:1])
    newer = (sys.executable, meshrun.script(NEWER, "newer.py"))
    where = ("--nnodes=2", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--node-rank", "1")
    result = meshrun.run(*where, meshrun.script(MEET), command=newer)
    assert result.code == 1
    version = auth._VERSION
    assert f"the other end speaks protocol version {version}, this end {version + 1}" in result.err
    assert f"127.0.0.1:{free_port}" in result.err
    assert first.poll() is None
    first.terminate()
    meshrun.finish(first)


def test_nodes_that_do_not_agree_are_told(meshrun, start_nodes):
    (first,) = start_nodes(MEET, "--nnodes=2", each=RANKED[:1])
    (second,) = start_nodes(MEET, "--nnodes=3", each=RANKED[1:])
    result = meshrun.finish(second)
    assert result.code == 1
    assert result.err == ("meshrun: --nnodes is 3:3 there, but 2:2 on the leading node\n")
    first.send_signal(signal.SIGTERM)
    assert meshrun.finish(first).code == 143


# The node that leads has to have arrived itself by then.
@pytest.mark.parametrize(
    ("rank", "seconds", "expected"),
    [("0", "3", "waited 3 s for 2 nodes; 1 arrived"), ("1", "0.5", "lost the connection to the")],
)
def test_a_node_that_stays_alone_gives_up(meshrun, start_nodes, rank, seconds, expected):
    each = (("--node-rank", rank, "--rdzv-conf", f"join_timeout={seconds}"),)
    (result,) = finish(meshrun, start_nodes(MEET, "--nnodes=2", each=each))
    assert result.code == 1
    assert expected in result.err


def test_a_port_in_use_is_named(meshrun, start_nodes, free_port):
    with socket.create_server(("127.0.0.1", free_port)):
        (result,) = finish(meshrun, start_nodes(MEET, "--nnodes=2", each=RANKED[:1]))
    assert result.code == 1
    assert f"port {free_port}" in result.err
    assert "Traceback" not in result.err


def test_a_failure_on_one_node_is_reported_by_all(meshrun, start_nodes):
    # Who is still on its way when another has failed is ended, and says nothing.
    script = """
        import meshlib as dist
        dist.init_process_group()
        store = dist.group.WORLD.get_group_store()
        if dist.get_rank() == 3:
            store.wait(["0", "1", "2"])
            raise ValueError("boom")
        store.set(str(dist.get_rank()), b"")
        dist.barrier()
    """
    nodes = start_nodes(script, each=RANKED, env=meshrun.long_windows())
    for result in finish(meshrun, nodes):
        assert result.code == 1
        assert "meshrun: rank 3 on " in result.err
        assert result.err.endswith("ValueError: boom\n")
        assert "ranks 0-2: RankFailedError: rank 3" in result.err


def test_all_nodes_start_again_together(meshrun, start_nodes):
    script = MEET.replace(
        "    dist.barrier()",
        """
    if (os.environ["RANK"], os.environ["MESHLIB_RESTART_COUNT"]) == ("1", "0"):
        raise ValueError("once")
    dist.barrier()""",
    )
    results = finish(meshrun, start_nodes(script, "--max-restarts=1", each=RANKED, ranks=1))
    assert [result.code for result in results] == [0, 0]
    assert results[0].out == "3 0 0 0 2 1\n"
    assert results[1].out == "3 1 0 1 2 1\n"
    for result in results:
        assert "ValueError: once; restarting all ranks\n" in result.err
        assert "Traceback" not in result.err


def test_ctrl_c_on_one_node_ends_all(meshrun, start_nodes):
    first, second = start_nodes(MEET_FOREVER, each=RANKED)
    wait_until_running(meshrun)
    second.send_signal(signal.SIGINT)
    results = finish(meshrun, (first, second))
    assert [result.code for result in results] == [1, 130]
    assert results[0].err.splitlines()[-1].startswith("meshrun: node 1 (")
    assert results[0].err.endswith("was interrupted\n")


def test_ctrl_c_on_the_leading_node_ends_all(meshrun, start_nodes):
    first, second = start_nodes(MEET_FOREVER, each=RANKED)
    wait_until_running(meshrun)
    first.send_signal(signal.SIGINT)
    results = finish(meshrun, (first, second))
    assert [result.code for result in results] == [130, 1]
    assert results[1].err.endswith("was interrupted\n")


def test_a_killed_launcher_is_noticed_by_the_others(meshrun, start_nodes):
    first, second = start_nodes(MEET_FOREVER, each=RANKED)
    wait_until_running(meshrun)
    second.kill()
    result = meshrun.finish(first)
    assert result.code == 1
    last = result.err.splitlines()[-1]
    assert last.startswith("meshrun: node 1 (")
    assert "was lost" in last
    assert "RankFailedError" in result.err


def test_a_killed_leader_is_noticed_by_the_others(meshrun, start_nodes, free_port):
    first, second = start_nodes(MEET_FOREVER, each=RANKED)
    wait_until_running(meshrun)
    first.kill()
    result = meshrun.finish(second)
    assert result.code == 1
    assert f"meshrun: lost the connection to the job's store at 127.0.0.1:{free_port}" in result.err


SPEAK = """
    import os, sys, time
    import meshlib as dist
    dist.init_process_group()
    dist.barrier()
    if dist.get_rank() == 0:
        print("world of", dist.get_world_size(), flush=True)
    while not os.path.exists("finish"):
        time.sleep(0.01)
"""


def test_a_leader_that_falls_silent_is_left_and_hears_of_it_when_it_is_back(
    meshrun, start_nodes, free_port
):
    nodes = start_nodes(MEET_FOREVER, "--rdzv-conf", "heartbeat_timeout=2", each=RANKED, ranks=1)
    leader, other = nodes
    wait_until_running(meshrun)
    leader.send_signal(signal.SIGSTOP)
    try:
        left = meshrun.finish(other)
    finally:
        leader.send_signal(signal.SIGCONT)
    assert left.code == 1
    lost = f"lost the connection to the job's store at 127.0.0.1:{free_port}: no answer for 2 s"
    assert lost in left.err
    back = meshrun.finish(leader)
    assert back.code == 1
    # It did not say goodbye, after which only its silence would tell.
    last = back.err.splitlines()[-1]
    assert last.startswith("meshrun: node 1 (")
    assert last.endswith("was lost: its connection to the store broke")


def test_nodes_come_and_go(meshrun, start_nodes):
    conf = ("--nnodes=1:2", "--max-restarts=1", "--rdzv-conf", "last_call_timeout=0.2")
    (first,) = start_nodes(SPEAK, *conf, each=((),), ranks=1)
    assert first.stdout.readline() == "world of 1\n"
    (second,) = start_nodes(SPEAK, *conf, each=((),), ranks=1)
    assert first.stdout.readline() == "world of 2\n"
    second.kill()
    assert first.stdout.readline() == "world of 1\n"
    (meshrun.folder / "finish").touch()
    result = meshrun.finish(first)
    assert result.code == 0
    first, second = result.err.splitlines()
    assert first.startswith("meshrun: another node (")
    assert first.endswith(" joins; restarting all ranks")
    assert second.startswith("meshrun: node 1 (")
    assert second.endswith(" was lost: its connection to the store broke; restarting all ranks")


# ---------------------------------------------------------------- network namespaces


@pytest.mark.netns
@pytest.mark.parametrize("network", [2, 3], indirect=True)
def test_hosts_meet_over_a_network(meshrun, network, start_hosts):
    results = finish(meshrun, start_hosts(MEET, ranks=2))
    assert [(result.code, result.err) for result in results] == [(0, "")] * len(results)
    size = 2 * len(network.names)
    total = size * (size + 1) // 2
    for node, result in enumerate(results):
        assert sorted(result.out.splitlines()) == [
            f"{total} {2 * node + i} {i} {node} {len(results)} 0" for i in range(2)
        ]


@pytest.mark.netns
@pytest.mark.parametrize("network", [3], indirect=True)
def test_a_host_that_is_cut_off_is_named_by_the_others(meshrun, network, start_hosts):
    hosts = start_hosts(MEET_FOREVER, "--rdzv-conf", "heartbeat_timeout=5")
    wait_until_running(meshrun)
    last = len(hosts) - 1
    network.cut_off(last)
    results = finish(meshrun, hosts)
    assert all(result.code == 1 for result in results)
    for result in results[:last]:
        lines = result.err.splitlines()
        assert lines[-1].startswith(f"meshrun: node {last} (")
        assert "sent no heartbeat for 5 s" in lines[-1]
        assert f"RankFailedError: rank {last} was lost" in result.err
    lost = "meshrun: lost the connection to the job's store at 10.200.0.1:29500"
    assert lost in results[last].err


@pytest.mark.netns
@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_store_for_others_listens_only_where_it_must(meshrun, network, start_hosts):
    hosts = start_hosts(SPEAK)
    assert hosts[0].stdout.readline() == "world of 2\n"
    listening = subprocess.run(
        [*network.command(0), "ss", "-Hltn"],
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    ).stdout
    addresses = {line.split()[3].rpartition(":")[0] for line in listening.splitlines()}
    assert addresses == {network.address(0)}
    (meshrun.folder / "finish").touch()
    assert [result.code for result in finish(meshrun, hosts)] == [0, 0]
