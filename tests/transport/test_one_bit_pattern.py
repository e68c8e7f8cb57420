"""One bit pattern: a sum depends on its inputs and the group's size, and on nothing else.

Numbers are such that any other order of addition gives other bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.net.far_links import FarInprocCommunicator
from tests.support.transport.pretended import pretended
from tests.support.transport.rank_threads import TINY, Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._communicators.runtime import Membership
from transport._inproc.communicator import InprocCommunicator
from transport._operands.compression import Compression
from transport._operands.reduce_op import Flat, ReduceOp, premul_sum
from transport._place import Place
from transport._shm import ShmCommunicator
from transport._tcp import TcpCommunicator

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex64]
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, premul_sum(1.1)]
TABLES = [
    TINY,
    DEFAULT,
    replace(TINY, star_ranks=0),
    replace(TINY, star=0, all_reduce_doubling=0, reduce_scatter_doubling=0, reduce_tree=0),
    replace(TINY, pairwise_ranks=16, all_reduce_doubling=0, reduce_tree=0),
    replace(TINY, pairwise_ranks=1, all_reduce_doubling=0, reduce_tree=0, frame=1 << 20),
]


def inputs_of(rank: int, count: int, dtype: Any) -> Flat:
    rng = np.random.default_rng(rank)
    found = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 2, count)
    return found.astype(dtype)


def expected(size: int, count: int, dtype: Any, op: ReduceOp) -> Flat:
    """The tree, as docs/inside/algorithms.md has it, by NumPy."""
    narrow = np.dtype(dtype).itemsize <= 2
    inputs = [inputs_of(rank, count, dtype) for rank in range(size)]
    values = [array.astype(np.float32) if narrow else array for array in inputs]
    if op.kind is ReduceOp.PREMUL_SUM:
        values = [np.multiply(value, op.factor, dtype=value.dtype) for value in values]
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [op.ufunc(*pair) if len(pair) > 1 else pair[0] for pair in pairs]
    total = values[0]
    if op.kind is ReduceOp.AVG.kind:
        parts = total.view(np.real(total).dtype) if total.dtype.kind == "c" else total
        total = np.divide(parts, size, dtype=parts.dtype).view(total.dtype)
    with np.errstate(over="ignore"):
        return total.astype(dtype)


def reduce_in_every_way(m: Member, count: int, dtype: Any, op: ReduceOp) -> list[bytes]:
    """The bytes of one sum, by an all_reduce, a reduce and a reduce_scatter with parts of
    different sizes; of the latter two what is here.
    """
    buffer = inputs_of(m.rank, count, dtype)
    m.all_reduce(buffer, op)
    found = [buffer.tobytes()]
    root = count % m.size
    buffer = inputs_of(m.rank, count, dtype)
    m.comm.reduce(m.call(Kind.REDUCE, dtype, count, op, root), buffer, op, root)
    if m.rank == root:
        found.append(buffer.tobytes())
    whole = inputs_of(m.rank, count, dtype)
    cuts = [0, *sorted(random.Random(count).choices(range(count + 1), k=m.size - 1)), count]
    parts = [whole[cuts[i] : cuts[i + 1]] for i in range(m.size)]
    output = np.empty(parts[m.rank].size, dtype)
    m.comm.reduce_scatter(m.call(Kind.REDUCE_SCATTER, dtype, op=op), output, parts, op)
    result = np.frombuffer(found[0], dtype).copy()
    result[cuts[m.rank] : cuts[m.rank + 1]] = output
    return [*found, result.tobytes()]


def hosts_of(names: list[int]) -> Transport:
    places = [Place(f"host {name}", site=f"site {name // 2}") for name in names]
    return pretended(places, InprocCommunicator)


def far_links(membership: Membership, table: Thresholds) -> FarInprocCommunicator:
    def window_of(_rank: int, _peer: int) -> int:
        return 1 << 10

    return FarInprocCommunicator(membership, table, window_of)


def ways(size: int, chance: random.Random) -> list[Transport]:
    """Transports and placements that a group of ``size`` may have."""
    return [
        Transport("inproc", InprocCommunicator),
        Transport("tcp", TcpCommunicator),
        Transport("far", far_links),
        hosts_of(sorted(chance.choices(range(3), k=size))),
        hosts_of([rank // 2 for rank in range(size)]),
        hosts_of([rank // 3 for rank in range(size)]),
        hosts_of(chance.choices(range(4), k=size)),
        Transport("shm", lambda membership, _: ShmCommunicator(membership)),
    ]


@pytest.mark.parametrize("seed", range(24))
def test_one_sum_has_one_bit_pattern(seed: int) -> None:
    chance = random.Random(seed)
    size, count = chance.randint(2, 9), chance.choice([1, 5, 40, 300, 3000])
    dtype, op = chance.choice(DTYPES), chance.choice(OPS)
    right = expected(size, count, dtype, op).tobytes()
    for transport in chance.sample(ways(size, chance), 3):
        table = chance.choice(TABLES)

        def body(m: Member) -> list[bytes]:
            return reduce_in_every_way(m, count, dtype, op)

        for rank, found in enumerate(run_group(transport, size, body, table)):
            assert all(each == right for each in found), (transport, table, size, count, rank)


@pytest.mark.parametrize("size", [17, 24])
def test_large_groups_halve_to_the_same_bits(size: int) -> None:
    right = expected(size, 500, np.float32, ReduceOp.SUM).tobytes()

    def body(m: Member) -> list[bytes]:
        return reduce_in_every_way(m, 500, np.float32, ReduceOp.SUM)

    for found in run_group(Transport("inproc", InprocCommunicator), size, body, TABLES[3]):
        assert all(each == right for each in found)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_a_compressed_sum_has_one_bit_pattern(size: int, form: str) -> None:
    """The tree adds what was rounded; a rank's own contribution to its own part was not."""
    count = 20_000

    def compressing(make: Callable[..., Any]) -> Transport:
        def made(membership: Membership, table: Thresholds) -> Any:
            return make(replace(membership, compression=Compression(form)), table)

        return Transport("compressing", made)

    def body(m: Member) -> bytes:
        buffer = inputs_of(m.rank, count, np.float32)
        m.all_reduce(buffer, ReduceOp.SUM)
        return buffer.tobytes()

    found = set[bytes]()
    for make in (InprocCommunicator, TcpCommunicator, far_links):
        found.update(run_group(compressing(make), size, body))
    assert len(found) == 1
