"""The hierarchical transport between hosts that are network namespaces: values and bytes."""

from __future__ import annotations

import json
import time

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.processes]

MEASURE = """
    import json, os, sys
    import numpy as np
    import meshlib as dist

    backend, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend)
    rank = dist.get_rank()
    count = 1 << 20
    x = np.arange(count, dtype=np.float32) % 97 + rank
    expected = (np.arange(count, dtype=np.float32) % 97) * ranks + sum(range(ranks))
    parts = [np.empty(count // 4, np.float32) for _ in range(ranks)]

    def all_reduce():
        y = x.copy()
        dist.all_reduce(y)
        assert np.array_equal(y, expected)

    def broadcast():
        y = x.copy()
        dist.broadcast(y, 1)
        assert np.array_equal(y, x - rank + 1)

    def all_gather():
        dist.all_gather(parts, np.full(count // 4, rank, np.float32))
        assert all((part == i).all() for i, part in enumerate(parts))

    def reduce_scatter():
        y = np.empty(count // 4, np.float32)
        dist.reduce_scatter(y, [np.full(count // 4, i + rank, np.float32) for i in range(ranks)])
        assert (y == ranks * rank + sum(range(ranks))).all()

    def sent():
        for line in open("/proc/net/dev"):
            name, _, numbers = line.strip().partition(":")
            if name == "eth0":
                return int(numbers.split()[8])

    found = {}
    for call in (all_reduce, broadcast, all_gather, reduce_scatter):
        call()
        dist.barrier()
        before = sent()
        dist.barrier()
        for _ in range(4):
            call()
        dist.barrier()
        found[call.__name__] = (sent() - before) / 4
    if rank % 2 == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
"""
MEBIBYTE = 1 << 20


def run(meshrun, start_hosts, backend):
    hosts = start_hosts(MEASURE.replace("sys.argv[1]", repr(backend)), ranks=2)
    results = [meshrun.finish(host) for host in hosts]
    assert [(result.code, result.err) for result in results] == [(0, "")] * len(results)
    return [json.loads(result.out) for result in results]


@pytest.mark.parametrize("network", [2, 3], indirect=True)
def test_what_a_network_card_sends_is_the_least(meshrun, network, start_hosts):
    """All bytes on the wire are counted, those of TCP, of the store and of the barriers too."""
    found = run(meshrun, start_hosts, "auto")
    h, n = len(found), 4 * MEBIBYTE
    total = {name: sum(host[name] for host in found) for name in found[0]}
    least = {
        "all_reduce": 2 * (h - 1) * n,
        "broadcast": (h - 1) * n,
        "all_gather": (h - 1) * 2 * h * MEBIBYTE,
        "reduce_scatter": (h - 1) * 2 * h * MEBIBYTE,
    }
    for name, expected in least.items():
        assert expected <= total[name] <= 1.05 * expected + 0.1 * MEBIBYTE, name


FOREVER = """
    import time
    import numpy as np
    import meshlib as dist

    dist.init_process_group("auto")
    x = np.ones(100_000)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        open("running", "w").close()
    while True:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_host_that_is_cut_off_is_named_by_all(meshrun, network, start_hosts):
    hosts = start_hosts(FOREVER, "--rdzv-conf", "heartbeat_timeout=5", ranks=2)
    assert meshrun.wait_for((meshrun.folder / "running").exists)
    begin = time.monotonic()
    network.cut_off(1)
    results = [meshrun.finish(host) for host in hosts]
    assert time.monotonic() - begin < 60
    assert all(result.code == 1 for result in results)
    assert "has not been heard of for 5 s" in results[0].err
    assert "RankFailedError: rank" in results[0].err
    assert "meshrun: lost touch with the job's store at 10.200.0.1:29500" in results[1].err


CUT_OFF = """
    import os, sys, time
    import numpy as np
    import meshlib as dist

    dist.init_process_group("BACKEND", timeout=6)
    x = np.ones(1000)
    dist.all_reduce(x)
    if dist.get_rank() == 1:
        open("running", "w").close()
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < 60:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
            begin = time.monotonic()
            time.sleep(0.01)
    except dist.DistError as error:
        rank, seconds = dist.get_rank(), time.monotonic() - begin
        print(f"rank {rank} {type(error).__name__} {seconds:.1f} s: {error}", flush=True)
        os._exit(1)
"""


@pytest.mark.parametrize("backend", ["tcp", "auto"])
@pytest.mark.parametrize("network", [2], indirect=True)
def test_both_sides_of_a_cut_wire_raise_at_the_deadline(meshrun, network, start_hosts, backend):
    """Also the one on which the store is not to be heard, and before its launcher ends it."""
    hosts = start_hosts(CUT_OFF.replace("BACKEND", backend))
    assert meshrun.wait_for((meshrun.folder / "running").exists)
    network.cut_off(1)
    results = [meshrun.finish(host) for host in hosts]
    assert all(result.code == 1 for result in results)
    for rank, result in enumerate(results):
        assert f"rank {rank} CollectiveTimeoutError" in result.out, result
        assert "is gone" not in result.out, result


MENDED = """
    import os, time
    import numpy as np
    import meshlib as dist

    dist.init_process_group("BACKEND", timeout=60)
    rank = dist.get_rank()
    x = np.ones(200_000)
    received = np.empty(3000)
    calls = 0
    while True:
        assert dist.all_reduce(x.copy())[-1] == 2
        if rank == 0:
            dist.send(np.full(3000, calls, np.float64), 1)
        else:
            dist.recv(received, 0)
            assert (received == calls).all()
        calls += 1
        stop = np.array([os.path.exists("plugged in")])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if calls == 10 and rank == 1:
            open("running", "w").close()
        if stop[0]:
            break
    print(f"rank {rank} made {calls} calls")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["tcp", "auto"])
@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_wire_that_is_cut_for_two_seconds_loses_nothing(meshrun, network, start_hosts, backend):
    hosts = start_hosts(MENDED.replace("BACKEND", backend))
    assert meshrun.wait_for((meshrun.folder / "running").exists)
    network.cut_off(1)
    time.sleep(2)
    network.plug_in(1)
    (meshrun.folder / "plugged in").touch()
    results = [meshrun.finish(host) for host in hosts]
    assert [(result.code, result.err) for result in results] == [(0, "")] * 2
    assert len({result.out.split()[-2] for result in results}) == 1
