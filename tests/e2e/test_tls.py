"""``meshrun`` with TLS: a whole job inside it, and settings that make no sense."""

from __future__ import annotations

import socket

import pytest
from certificates import Authority

pytestmark = pytest.mark.processes

MEET = """
    import os
    import numpy as np
    os.chdir("/")  # the files were named from where meshrun was started
    import meshlib as dist
    from transport.net.tls import TlsSocket

    dist.init_process_group("tcp")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.full(100_000, rank + 1.0)
    dist.all_reduce(x)
    assert (x == size * (size + 1) / 2).all()
    if rank == 0:
        dist.send(x, dst=size - 1)
    elif rank == size - 1:
        dist.recv(x, src=0)
    import gc
    used = [o for o in gc.get_objects() if isinstance(o, TlsSocket) and o.fileno() >= 0]
    print("inside TLS" if len(used) >= 2 else "plain", flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def settings(meshrun):
    """The variables, with paths relative to where the launchers are started."""
    files = Authority(meshrun.folder / "certificates").issue("rank")
    return {
        name: str(type(files.ca)(path).relative_to(meshrun.folder))
        for name, path in files.variables.items()
    }


def test_a_job_of_one_node(meshrun, settings):
    result = meshrun.run("--nproc-per-node", "3", meshrun.script(MEET), env=settings)
    assert result.code == 0, result.err
    assert result.out.split("\n")[:3] == ["inside TLS"] * 3


def start_two(meshrun, first, second):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = ("--nnodes=2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "join_timeout=10")
    script = meshrun.script(MEET)
    return [
        meshrun.start(*where, f"--node-rank={rank}", script, env=env)
        for rank, env in enumerate((first, second))
    ]


def test_a_job_of_two_nodes(meshrun, settings):
    for node in start_two(meshrun, settings, settings):
        result = meshrun.finish(node)
        assert result.code == 0, result.err
        assert "inside TLS" in result.out


def test_a_node_without_tls(meshrun, settings):
    with_tls, without = start_two(meshrun, settings, {})
    result = meshrun.finish(without)
    assert result.code != 0
    assert "the other end speaks TLS and this end does not" in result.err
    assert "MESHLIB_TLS_CERT" in result.err
    with_tls.terminate()
    assert meshrun.finish(with_tls).code != 0


def test_half_a_setting_is_an_error_before_anything_starts(meshrun, settings):
    del settings["MESHLIB_TLS_KEY"]
    result = meshrun.run(meshrun.script("print('started')"), env=settings)
    assert result.code == 2
    assert "MESHLIB_TLS_KEY not set" in result.err
    assert result.out == ""
