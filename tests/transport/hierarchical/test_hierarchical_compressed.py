"""Compressed reductions over several hosts: only what crosses the network is compressed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.transport.counting import Count, counting
from tests.support.transport.pretended import pretended
from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._operands.compression import Compression
from transport._operands.reduce_op import ReduceOp, error_feedback
from transport._place import Place

SIZE = 1 << 17
F32, F16 = np.dtype(np.float32), np.dtype(np.float16)
TABLE = Thresholds(segment=16 << 10)  # so that 16-bit floats are widened in several chunks


def on_hosts(hosts: str, network: Count) -> Transport:
    """Hosts with a capital letter are another site; then the network is what is between sites."""
    local = Count()

    def count_of(rank: int, peer: int) -> Count:
        if hosts.islower():
            return local if hosts[rank] == hosts[peer] else network
        return local if hosts[rank].islower() == hosts[peer].islower() else network

    places = [Place(host, site="" if host.islower() else "far") for host in hosts]
    return pretended(places, counting(count_of), Compression("int8"))


def values(seed: int, dtype: Any = F32) -> Any:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(dtype)


@pytest.mark.parametrize("hosts", ["aabb", "abcab", "abCD", "aBbAA"])
@pytest.mark.parametrize("dtype", [F32, F16])
def test_what_crosses_is_a_quarter_and_nothing_is_lost(hosts: str, dtype: Any) -> None:
    network, calls = Count(), 3

    def body(m: Member) -> tuple[Any, Any, Any]:
        residual, put_in, got = np.zeros(SIZE, F32), np.zeros(SIZE), np.zeros(SIZE)
        for number in range(calls):
            buffer = values(100 * number + m.rank, dtype)
            put_in += buffer
            m.all_reduce(buffer, error_feedback(ReduceOp.AVG, residual))
            got += buffer
        return put_in, got, residual

    found = run_group(on_hosts(hosts, network), len(hosts), body, TABLE)
    others = len(set(hosts)) - 1 if hosts.islower() else 1
    assert network.bytes == pytest.approx(calls * 2 * others * SIZE * (1 + 4 / 256), rel=0.01)
    total = sum(put_in for put_in, _, _ in found)
    left = sum(residual.astype(np.float64) for _, _, residual in found)
    assert len({got.tobytes() for _, got, _ in found}) == 1
    # Results of 16 bits are rounded once more, which is nobody's to keep.
    tolerance = 1e-4 if dtype == F32 else calls * len(hosts) * 4 * 2.0**-11
    np.testing.assert_allclose(found[0][1] * len(hosts) + left, total, atol=tolerance)


def test_a_reduce_scatter_crosses_as_a_quarter() -> None:
    hosts, network = "aabb", Count()

    def body(m: Member) -> Any:
        inputs = [values(10 * m.rank + i) for i in range(m.size)]
        output = np.zeros(SIZE, F32)
        call = m.call(Kind.REDUCE_SCATTER, F32, op=ReduceOp.SUM)
        m.comm.reduce_scatter(call, output, inputs, ReduceOp.SUM)
        return output

    results = run_group(on_hosts(hosts, network), 4, body, TABLE)
    assert network.bytes == pytest.approx(4 * SIZE * (1 + 4 / 256), rel=0.01)
    for rank, output in enumerate(results):
        exact = sum(values(10 * other + rank) for other in range(4))
        np.testing.assert_allclose(output, exact, atol=0.1)


def test_one_host_has_nothing_to_compress() -> None:
    def body(m: Member) -> Any:
        buffer = values(m.rank)
        m.all_reduce(buffer, ReduceOp.SUM)
        return buffer

    for found in run_group(on_hosts("aa", Count()), 2, body, TABLE):
        assert np.array_equal(found, values(0) + values(1))
