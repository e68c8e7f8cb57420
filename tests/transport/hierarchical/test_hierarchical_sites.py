"""Three levels: what crosses between sites, and between the hosts of a site.

Hosts and sites are pretended: ranks are threads, and a rank is told where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.transport.counting import Count, counting
from tests.support.transport.pretended import Across, pretended
from tests.support.transport.rank_threads import TINY, Member, Transport, run_group
from transport._calls.header import Kind
from transport._choosing.choice import Thresholds
from transport._errors import PeerLostError
from transport._hierarchical.hosts import MembersByHost
from transport._inproc.communicator import InprocCommunicator
from transport._operands.reduce_op import ReduceOp, premul_sum
from transport._place import Place, this_place

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
LARGE = 1003
TABLE = replace(TINY, segment=256, one_slice=0, reduce_scatter_doubling=0)
SITES = {"a": "here", "b": "here", "c": "there", "d": "there", "e": "elsewhere"}
PLACEMENTS = ["abcd", "aabbccdd", "cabdabdc", "abce", "aabcced"]
"""By rank, the hosts; a and b are one site, c and d another one, e is a third."""


def placed(hosts: str, across: Across = InprocCommunicator) -> Transport:
    return pretended([Place(host, site=SITES[host]) for host in hosts], across)


def counted(
    hosts: str, body: Callable[[Member], None], table: Thresholds = TABLE
) -> tuple[Count, Count]:
    """Return what crossed between sites, and what between the hosts of a site."""
    far, near, local = Count(), Count(), Count()

    def count_of(rank: int, peer: int) -> Count:
        ours, theirs = hosts[rank], hosts[peer]
        if SITES[ours] != SITES[theirs]:
            return far
        return local if ours == theirs else near

    run_group(placed(hosts, counting(count_of)), len(hosts), body, table)
    assert local.bytes == 0  # shared memory is for that
    return far, near


def sent(hosts: str, body: Callable[[Member], None]) -> tuple[int, int]:
    """Return the bytes that crossed between sites, and those between the hosts of a site."""
    far, near = counted(hosts, body)
    return far.bytes, near.bytes


def crossings(hosts: str) -> tuple[int, int]:
    """How many sites there are beside one, and how many hosts beside one at each."""
    sites = len({SITES[host] for host in hosts})
    return sites - 1, len(set(hosts)) - sites


@pytest.mark.parametrize("hosts", PLACEMENTS)
def test_what_all_have_in_common_crosses_once_a_site(hosts: str) -> None:
    n, (far, near) = len(hosts), crossings(hosts)
    sizes = [100 + 37 * (rank % 4) for rank in range(n)]

    def all_reduce(dtype: np.dtype[Any], op: ReduceOp) -> Callable[[Member], None]:
        return lambda member: member.all_reduce(np.ones(LARGE, dtype), op)

    def broadcast(member: Member) -> None:
        call = member.call(Kind.BROADCAST, F32, LARGE, root=2)
        member.comm.broadcast(call, np.ones(LARGE, F32), 2)

    def reduce(member: Member) -> None:
        call = member.call(Kind.REDUCE, F32, LARGE, ReduceOp.SUM, 2)
        member.comm.reduce(call, np.ones(LARGE, F32), ReduceOp.SUM, 2)

    def gather(member: Member) -> None:
        outputs = [np.zeros(size, F32) for size in sizes]
        own = np.ones(sizes[member.rank], F32)
        member.comm.all_gather(member.call(Kind.ALL_GATHER, F32), outputs, own)

    def scatter(member: Member) -> None:
        inputs, output = [np.ones(size, F32) for size in sizes], np.zeros(sizes[member.rank], F32)
        call = member.call(Kind.REDUCE_SCATTER, F32, op=ReduceOp.SUM)
        member.comm.reduce_scatter(call, output, inputs, ReduceOp.SUM)

    assert sent(hosts, broadcast) == (4 * far * LARGE, 4 * near * LARGE)
    assert sent(hosts, gather)[0] == 4 * far * sum(sizes)
    if hosts not in ("abcd", "aabbccdd", "abce"):
        return  # sites have several sums each
    # Within sites a reduce_scatter before, and an all_gather behind.
    assert sent(hosts, all_reduce(F32, ReduceOp.AVG)) == (8 * far * LARGE, 8 * near * LARGE)
    assert sent(hosts, all_reduce(F32, premul_sum(2.0)))[0] == 8 * far * LARGE
    assert sent(hosts, all_reduce(BF16, ReduceOp.SUM))[0] == far * LARGE * (4 + 2)
    assert sent(hosts, reduce)[0] == 4 * far * LARGE
    assert sent(hosts, scatter)[0] == 4 * far * sum(sizes)


def _parts(member: Member, count: int = 2) -> list[Any]:
    return [np.ones(count, F32) for _ in range(member.size)]


def _rooted(member: Member, collective: str, kind: Kind) -> None:
    parts = _parts(member) if member.rank == 0 else None
    call, own = member.call(kind, F32, root=0), np.ones(2, F32)
    arguments = (parts, own) if collective == "gather" else (own, parts)
    getattr(member.comm, collective)(call, *arguments, 0)


SMALL: dict[str, Callable[[Member], None]] = {
    "barrier": Member.barrier,
    "broadcast": lambda m: m.comm.broadcast(
        m.call(Kind.BROADCAST, F32, 2, root=0), np.ones(2, F32), 0
    ),
    "all_reduce": lambda m: m.all_reduce(np.ones(2, F32), ReduceOp.SUM),
    "reduce": lambda m: m.comm.reduce(
        m.call(Kind.REDUCE, F32, 2, ReduceOp.SUM, 0), np.ones(2, F32), ReduceOp.SUM, 0
    ),
    "all_gather": lambda m: m.comm.all_gather(
        m.call(Kind.ALL_GATHER, F32), _parts(m), np.ones(2, F32)
    ),
    "reduce_scatter": lambda m: m.comm.reduce_scatter(
        m.call(Kind.REDUCE_SCATTER, F32, op=ReduceOp.SUM), np.ones(2, F32), _parts(m), ReduceOp.SUM
    ),
    "gather": lambda m: _rooted(m, "gather", Kind.GATHER),
    "scatter": lambda m: _rooted(m, "scatter", Kind.SCATTER),
    "all_to_all": lambda m: m.comm.all_to_all(m.call(Kind.ALL_TO_ALL, F32), _parts(m), _parts(m)),
}


@pytest.mark.parametrize("collective", SMALL)
@pytest.mark.parametrize("hosts", ["abcd", "acbd", "aabbccdd"])
def test_small_calls_cross_between_two_sites_so_often(hosts: str, collective: str) -> None:
    """Frames, and bytes of 8 a member: nothing goes there and back where one way does."""
    n = len(hosts)
    far, _ = counted(hosts, SMALL[collective], replace(TABLE, one_slice=1 << 20))
    # Sites with ranks by turns have two sums each.
    sums = 2 if hosts == "acbd" else 1
    assert (far.frames, far.bytes) == {
        "barrier": (2, 0),
        "broadcast": (1, 8),
        "all_reduce": (2, 16 * sums),
        "reduce": (1, 8 * sums),
        "all_gather": (2, 8 * n),
        "reduce_scatter": (2, 8 * n * sums),
        "gather": (n // 2, 4 * n),
        "scatter": (n // 2, 4 * n),
        "all_to_all": (n * n // 2, 4 * n * n),
    }[collective]


def test_a_broadcast_crosses_while_it_goes_round_at_home() -> None:
    """A segment of each slice at a time: the root has sent some of them across before it has given
    the last ones to its own site.
    """
    order: list[bool] = []

    class Noted(Count):
        def __init__(self, far: bool) -> None:
            super().__init__()
            self.far = far

        def add(self, nbytes: int) -> None:
            order.append(self.far)

    def count_of(rank: int, peer: int) -> Count:
        return Noted(peer > 1) if rank == 0 else Count()

    def broadcast(member: Member) -> None:
        values = np.arange(LARGE, dtype=F32) if member.rank == 0 else np.zeros(LARGE, F32)
        member.comm.broadcast(member.call(Kind.BROADCAST, F32, LARGE, root=0), values, 0)
        assert (values == np.arange(LARGE)).all()

    run_group(placed("abcd", counting(count_of)), 4, broadcast, TABLE)
    chunks = -(-4 * LARGE // (2 * TABLE.segment))
    assert order == [False, True] * chunks


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_results_are_the_same_bits_everywhere(hosts: str, dtype: np.dtype[Any]) -> None:
    n = len(hosts)

    def body(member: Member) -> tuple[bytes, bytes]:
        values = np.random.default_rng(member.rank).normal(size=LARGE).astype(dtype)
        total, part = values.copy(), np.zeros(40, dtype)
        member.all_reduce(total, ReduceOp.SUM)
        call = member.call(Kind.REDUCE_SCATTER, dtype, op=ReduceOp.SUM)
        cut = [values[40 * i : 40 * (i + 1)] for i in range(n)]
        member.comm.reduce_scatter(call, part, cut, ReduceOp.SUM)
        outputs = [np.empty(40, dtype) for _ in range(n)]
        member.comm.all_gather(member.call(Kind.ALL_GATHER, dtype), outputs, part)
        member.comm.broadcast(member.call(Kind.BROADCAST, dtype, LARGE, root=1), values, 1)
        gathered = np.concatenate(outputs)
        everybody = [np.random.default_rng(rank).normal(size=LARGE) for rank in range(n)]
        exact = np.sum([each.astype(dtype).astype(np.float64) for each in everybody], axis=0)
        tolerance = 1e-2 if dtype == BF16 else 1e-5
        for found in (total, gathered):
            np.testing.assert_allclose(
                found.astype(np.float64), exact[: found.size], tolerance, tolerance * n
            )
        assert (values == everybody[1].astype(dtype)).all()
        return total.tobytes(), gathered.tobytes()

    assert len(set(run_group(placed(hosts), n, body, TABLE))) == 1


@pytest.mark.parametrize("hosts", ["aabc", "acca"])
def test_allocated_memory_is_reduced_like_any_other(hosts: str) -> None:
    def body(member: Member) -> None:
        memory = member.comm.allocate(member.call(Kind.ALLOCATE, F32), LARGE, F32)
        memory[:] = member.rank
        member.all_reduce(memory, ReduceOp.SUM)
        assert (memory == sum(range(len(hosts)))).all()

    run_group(placed(hosts), len(hosts), body, TABLE)


def test_errors_inside_a_host_name_ranks_of_the_whole_group() -> None:
    """Ranks 3 and 5 are on host d, whose site has ranks 1 and 4 as well."""

    def body(member: Member) -> None:
        member.barrier()
        if member.rank == 5:
            member.comm.close()
        elif member.rank == 3:
            with pytest.raises(PeerLostError, match="rank 5") as lost:
                member.comm.barrier(member.call(Kind.BARRIER))
            assert lost.value.peer == 5

    run_group(placed("acbdcd"), 6, body, TABLE)


def test_a_site_is_that_of_its_hosts_first_members() -> None:
    places = [Place(host, site=SITES[host]) for host in "caabed"]
    places[2] = replace(places[2], site="a mistake", obstacle="none")
    placement = MembersByHost.of(places)
    assert placement.sites == ("there", "here", "here", "elsewhere", "there")
    sites = placement.by_site()
    assert sites.hosts == ((0, 5), (1, 2, 3), (4,))
    here = placement.within(sites.hosts[1])
    assert (here.hosts, here.memory) == (((0, 1), (2,)), (False, False))
    assert MembersByHost.of([Place("a"), Place("b")]).by_site().hosts == ((0, 1),)


def test_the_environment_names_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHLIB_SITE", raising=False)
    assert this_place().site == ""
    monkeypatch.setenv("MESHLIB_SITE", "north")
    assert this_place().site == "north"
    assert Place.decode(this_place().encode()) == this_place()
