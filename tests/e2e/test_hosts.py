"""The hierarchical transport between hosts that are network namespaces: values and bytes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [pytest.mark.netns, pytest.mark.processes]

MEASURE = (PROGRAMS / "bytes_of_collectives.py").read_text()
MEBIBYTE = 1 << 20


def run(meshrun, start_hosts, backend):
    hosts = start_hosts(MEASURE, arguments=[backend], ranks=2)
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
    network.cut_off(1)
    results = [meshrun.finish(host) for host in hosts]
    assert all(result.code == 1 for result in results)
    assert "sent no heartbeat for 5 s" in results[0].err
    assert "RankFailedError: rank" in results[0].err
    assert "meshrun: lost the connection to the job's store at 10.200.0.1:29500" in results[1].err


CUT_OFF = (PROGRAMS / "cut_off.py").read_text()


@pytest.mark.parametrize("backend", ["tcp", "auto"])
@pytest.mark.parametrize("network", [2], indirect=True)
def test_both_sides_of_a_cut_wire_raise_at_the_deadline(meshrun, network, start_hosts, backend):
    """Also the one on which the store is not to be heard, and before its launcher ends it."""
    hosts = start_hosts(CUT_OFF, arguments=[backend])
    assert meshrun.wait_for((meshrun.folder / "running").exists)
    network.cut_off(1)
    results = [meshrun.finish(host) for host in hosts]
    assert all(result.code == 1 for result in results)
    for rank, result in enumerate(results):
        assert f"rank {rank} CollectiveTimeoutError" in result.out, result
        assert "is gone" not in result.out, result


MENDED = (PROGRAMS / "goes_on_after_a_cut.py").read_text()


@pytest.mark.parametrize("backend", ["tcp", "auto"])
@pytest.mark.parametrize("network", [2], indirect=True)
def test_a_wire_that_is_cut_for_two_seconds_loses_nothing(meshrun, network, start_hosts, backend):
    hosts = start_hosts(MENDED, arguments=[backend])
    assert meshrun.wait_for((meshrun.folder / "running").exists)
    network.cut_off(1)
    time.sleep(2)
    network.plug_in(1)
    (meshrun.folder / "plugged in").touch()
    results = [meshrun.finish(host) for host in hosts]
    assert [(result.code, result.err) for result in results] == [(0, "")] * 2
    assert len({result.out.split()[-2] for result in results}) == 1
