"""Sending ahead: as far as a link's window needs, and each member on its own; the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.net.far_links import FarInprocCommunicator
from tests.support.transport.rank_threads import Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._inproc.communicator import InprocCommunicator
from transport._operands.reduce_op import ReduceOp, premul_sum

SEGMENT = 256
TABLE = Thresholds(
    star=0, all_reduce_doubling=0, reduce_scatter_doubling=0, all_gather_doubling=0, segment=SEGMENT
)
WindowOf = Callable[[int, int], int]


def transport(window_of: WindowOf) -> Transport:
    return Transport("far", lambda member, table: FarInprocCommunicator(member, table, window_of))


def everywhere(nbytes: int) -> WindowOf:
    return lambda rank, peer: nbytes


def one_far_link(rank: int, peer: int) -> int:
    """Only rank 1 has found its peer to be far, and only rank 0."""
    return 3 * SEGMENT if (rank, peer) == (1, 0) else 0


KINDS: list[tuple[Any, Callable[[int], ReduceOp]]] = [
    (np.float32, lambda rank: ReduceOp.AVG),
    (np.float32, lambda rank: premul_sum(0.3 + rank)),
    (ml_dtypes.bfloat16, lambda rank: ReduceOp.SUM),
    (ml_dtypes.bfloat16, lambda rank: premul_sum(0.3 + rank)),
    (np.int16, lambda rank: ReduceOp.MAX),
]


def every_result(m: Member) -> list[bytes]:
    """All_reduce, reduce_scatter (in place as well) and all_to_all, of several dtypes and sizes."""
    n, found = m.size, list[bytes]()
    for number, ((dtype, op_of), size) in enumerate(product(KINDS, (0, 700, 1501))):
        rng, op = np.random.default_rng([m.rank, number]), op_of(m.rank)
        buffer = (rng.standard_normal(size) * 8).astype(dtype)
        inputs = [(rng.standard_normal(size + 40 * i) * 8).astype(dtype) for i in range(n)]
        kept = [part.copy() for part in inputs]
        m.all_reduce(buffer, op)
        output = np.empty_like(inputs[m.rank])
        m.comm.reduce_scatter(m.call(Kind.REDUCE_SCATTER, dtype), output, inputs, op)
        assert [part.tobytes() for part in inputs] == [part.tobytes() for part in kept]
        m.comm.reduce_scatter(m.call(Kind.REDUCE_SCATTER, dtype), inputs[m.rank], inputs, op)
        assert inputs[m.rank].tobytes() == output.tobytes()
        swapped = [np.empty(size + 40 * m.rank, dtype) for _ in range(n)]
        m.comm.all_to_all(m.call(Kind.ALL_TO_ALL, dtype), swapped, kept)
        found += [part.tobytes() for part in (buffer, output, *swapped)]
    return found


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_bits_are_those_of_the_lockstep(n: int) -> None:
    lockstep = run_group(Transport("inproc", InprocCommunicator), n, every_result, TABLE)
    for window_of in (everywhere(SEGMENT), everywhere(10**6), one_far_link):
        assert run_group(transport(window_of), n, every_result, TABLE) == lockstep


def log_of(n: int, window_of: WindowOf, body: Callable[[Member], Any]) -> list[list[Any]]:
    def run(m: Member) -> list[Any]:
        body(m)
        assert isinstance(m.comm, FarInprocCommunicator)
        return m.comm.log

    return run_group(transport(window_of), n, run, TABLE)


def test_the_bits_do_not_depend_on_the_segment() -> None:
    def body(m: Member) -> bytes:
        buffer = np.random.default_rng(m.rank).standard_normal(5003).astype(np.float32)
        m.all_reduce(buffer, ReduceOp.SUM)
        return buffer.tobytes()

    kind = Transport("inproc", InprocCommunicator)
    small, large = (run_group(kind, 3, body, replace(TABLE, segment=s)) for s in (256, 4096))
    assert small == large


@pytest.mark.parametrize("n", [2, 9])
def test_what_arrives_is_bounded(n: int) -> None:
    def body(m: Member) -> int:
        m.all_reduce(np.ones(100 * n * SEGMENT // 4, np.float32), ReduceOp.SUM)
        return m.comm.scratch.nbytes  # pyright: ignore

    held = max(run_group(transport(everywhere(10**6)), n, body, TABLE))
    assert held <= 40 * SEGMENT + 4096 * (n - 1).bit_length()  # the least that a slot takes


def test_a_chain_passes_a_segment_on_when_it_has_arrived() -> None:
    chunks = 7

    def body(m: Member) -> list[Any]:
        buffer = np.full(chunks * SEGMENT // 4, m.rank, np.float32)
        m.comm.broadcast(m.call(Kind.BROADCAST, np.float32, root=1), buffer, 1)
        assert (buffer == 1).all()
        assert isinstance(m.comm, FarInprocCommunicator)
        return [(what, peer) for what, peer, _ in m.comm.log]

    table = replace(TABLE, broadcast_tree=0)
    logs = run_group(transport(everywhere(0)), 4, body, table)
    expected = [("expect", 1)] * chunks + [("receive", 1), ("post", 3)] * chunks
    assert logs[1] == [("post", 2)] * chunks
    assert logs[2] == expected


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("window", "chunks_ahead"), [(0, 1), (2 * SEGMENT, 1), (6 * SEGMENT, 3)])
def test_a_rank_is_so_many_laps_ahead_and_no_more(n: int, window: int, chunks_ahead: int) -> None:
    chunks = 9
    size = chunks * n * SEGMENT // 4

    def body(m: Member) -> None:
        m.all_reduce(np.ones(size, np.float32), ReduceOp.SUM)

    for log in log_of(n, everywhere(window), body):
        peers = {peer for _, peer, _ in log}
        for peer in peers:
            events = [what for what, other, _ in log if other == peer]
            assert Counter(events) == {
                "post": 2 * chunks,
                "expect": 2 * chunks,
                "receive": 2 * chunks,
            }
            received = [i for i, what in enumerate(events) if what == "receive"]
            for chunk, at in enumerate(received[:chunks]):
                # The results of the chunks before, and inputs so many chunks ahead.
                assert events[:at].count("post") == chunk + min(chunk + chunks_ahead + 1, chunks)
                # No result is waited for; two inputs may come.
                assert events[:at].count("expect") == chunk + 1 + min(chunk + 2, chunks)


@pytest.mark.parametrize("what", ["all_gather", "all_to_all"])
def test_copies_leave_before_the_first_is_awaited(what: str) -> None:
    n = 4

    def body(m: Member) -> None:
        outputs = [np.empty(SEGMENT, np.float32) for _ in range(n)]
        inputs = [np.full(SEGMENT, m.rank, np.float32) for _ in range(n)]
        if what == "all_gather":
            m.comm.all_gather(m.call(Kind.ALL_GATHER, np.float32), outputs, inputs[0])
        else:
            m.comm.all_to_all(m.call(Kind.ALL_TO_ALL, np.float32), outputs, inputs)
        assert [output.tolist() for output in outputs] == [[i] * SEGMENT for i in range(n)]

    table = replace(TABLE, segment=64)  # frames larger than what is sent at once
    logs = log_of(n, everywhere(10**6), body)
    assert table.segment < SEGMENT
    for log in logs:
        events = [event for event, _, _ in log]
        assert events == [event for event in ("expect", "post", "receive") for _ in range(n - 1)]


def test_no_memory_is_kept_for_what_is_ahead() -> None:
    size = 64 * 2 * SEGMENT // 4

    def body(m: Member) -> int:
        m.all_reduce(np.ones(size, np.float32), ReduceOp.SUM)
        return m.comm.scratch.nbytes  # pyright: ignore

    ahead = run_group(transport(everywhere(10**6)), 2, body, TABLE)
    lockstep = run_group(Transport("inproc", InprocCommunicator), 2, body, TABLE)
    assert max(ahead) <= max(lockstep)
