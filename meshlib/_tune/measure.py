"""The program of each rank, which measures one transport among all ranks of the job."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from meshlib._job.current import current_world
from meshlib._job.starting.init import destroy_process_group, init_process_group
from meshlib._job.world import World
from meshlib._records import JsonRecord
from meshlib._tune.contests import CONTESTS, EXCHANGED, LARGE_BYTES, SEGMENTS, Contest
from meshlib._tune.estimates import best_of, crossover, fit_line
from meshlib._tune.stopwatch import CallIssuer, interleaved
from transport._calls.call import Call
from transport._calls.header import Kind
from transport._choosing.choice import DEFAULT, Thresholds
from transport._choosing.cost import Cost
from transport._communicators.base import Communicator
from transport._communicators.runtime import Membership
from transport._hierarchical.auto import choose
from transport._hierarchical.cost import inside_bytes
from transport._inproc.communicator import InprocCommunicator
from transport._link import exchange as exchange_frames
from transport._links.communicator import LinkCommunicator
from transport._operands.flat import as_bytes
from transport._place import Place
from transport._platform import available_cores
from transport._shm import ShmCommunicator
from transport._store.prefix_store import PrefixStore
from transport._tcp import TcpCommunicator

TRANSPORTS = ("tcp", "shm", "hierarchical", "inproc")
_GAMMA_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class TuningResults(JsonRecord):
    """The results of the measurements with one number of ranks."""

    cost: Cost | None
    thresholds: Thresholds


class TransportBenchmark:
    """A measurement of communicators of ``transport`` among all ranks of the World."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._world: World = current_world()
        self._size = self._world.size
        self._names = count()

    def thresholds(self) -> Thresholds:
        """Return the best table for this number of ranks."""
        table = DEFAULT
        for contest in CONTESTS.get(self._transport, ()):
            if self._size >= contest.least_ranks:
                table = replace(table, **{contest.field: self._decide(contest)})
        return self._decide_large(table) if self._transport in ("tcp", "inproc") else table

    def cost(self) -> Cost | None:
        """Return the costs of a frame, a byte and a reduced byte.

        None for ``hierarchical``, which uses the costs of its inner transports.
        """
        if self._transport == "hierarchical":
            return None
        parallelism = available_cores()
        with self._issuer(DEFAULT) as issuer:
            if isinstance(issuer.communicator, LinkCommunicator):
                alpha, beta = _exchange_cost(issuer, issuer.communicator)
            else:
                alpha, beta = self._shared_memory_cost(issuer)
        return Cost(alpha, beta, _gamma(), float(parallelism))

    def _decide(self, contest: Contest) -> int:
        with ExitStack() as stack:
            issuers = [
                stack.enter_context(self._issuer(table)) for table in (contest.below, contest.above)
            ]
            times = [interleaved(issuers, contest.kind, size) for size in contest.sizes]
        below, above = zip(*times, strict=True)
        return crossover(contest.sizes, below, above)

    def _decide_large(self, table: Thresholds) -> Thresholds:
        """Return ``table`` with the fields that matter for large data."""
        pairs = replace(table, all_reduce_doubling=0, frame=0, pairwise_ranks=self._size)
        halving = replace(pairs, pairwise_ranks=0)
        with ExitStack() as stack:
            issuers = [stack.enter_context(self._issuer(choice)) for choice in (pairs, halving)]
            pairwise, halved = interleaved(issuers, Kind.ALL_REDUCE, LARGE_BYTES)
        if self._size > 2 and halved < 0.97 * pairwise:
            table = replace(table, pairwise_ranks=self._size - 1)
        with ExitStack() as stack:
            choices = [replace(table, segment=segment) for segment in SEGMENTS]
            issuers = [stack.enter_context(self._issuer(choice)) for choice in choices]
            times = interleaved(issuers, Kind.ALL_REDUCE, LARGE_BYTES, rounds=2)
        seconds = dict(zip(SEGMENTS, times, strict=True))
        return replace(table, segment=best_of(seconds, DEFAULT.segment))

    def _shared_memory_cost(self, issuer: CallIssuer) -> tuple[float, float]:
        sizes = [size for size in EXCHANGED if size >= 64 << 10]
        times = [interleaved([issuer], Kind.ALL_REDUCE, size)[0] for size in sizes]
        moved = [inside_bytes(Kind.ALL_REDUCE, size, self._size) for size in sizes]
        _, beta = fit_line(moved, times)
        # A step costs as much as a barrier: each rank signals, then waits for all signals.
        return interleaved([issuer], Kind.BARRIER, 0)[0], beta

    @contextlib.contextmanager
    def _issuer(self, table: Thresholds) -> Generator[CallIssuer]:
        # Ranks make the same communicators in the same order, so the names agree.
        name = f"tune-{self._transport}-{next(self._names)}"
        world = self._world
        store = PrefixStore(name, world.store)
        membership = Membership(name, world.rank, tuple(range(self._size)), store, world.runtime)
        communicator = self._make(membership, table)
        try:
            yield CallIssuer(communicator)
        finally:
            communicator.close()

    def _make(self, membership: Membership, table: Thresholds) -> Communicator:
        match self._transport:
            case "tcp":
                return TcpCommunicator(membership, table)
            case "inproc":
                return InprocCommunicator(membership, table)
            case "shm":
                return ShmCommunicator(membership)
            case _:  # simulates two hosts
                halves = (2 * rank // membership.size for rank in range(membership.size))
                places = tuple(Place(f"half {half}") for half in halves)
                return choose(replace(membership, places=places), table)


def _exchange_cost(issuer: CallIssuer, communicator: LinkCommunicator) -> tuple[float, float]:
    """Return the seconds of a frame and of a byte, with both directions in use."""
    peer = communicator.rank ^ 1
    times: list[float] = []
    for nbytes in EXCHANGED:
        sent, received = (as_bytes(np.zeros(nbytes, np.uint8)) for _ in range(2))

        def exchange(call: Call, sent: memoryview = sent, received: memoryview = received) -> None:
            link = communicator.link(peer, call)
            exchange_frames(call, link, sent, link, received)

        times.append(statistics.median(issuer.times(Kind.BARRIER, exchange, nbytes)))
    return fit_line(EXCHANGED, times)


def _gamma() -> float:
    """Return the seconds to add a byte of float32 to another, for arrays of 256 KiB."""
    lower, upper = np.ones(_GAMMA_BYTES // 4, np.float32), np.ones(_GAMMA_BYTES // 4, np.float32)
    seconds: list[float] = []
    for _ in range(50):
        began = time.perf_counter()
        np.add(lower, upper, out=upper)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) / _GAMMA_BYTES


def measure(transport: str) -> TuningResults:
    """Return the measurements among all ranks of the job; every rank must call it."""
    bench = TransportBenchmark(transport)
    return TuningResults(bench.cost(), bench.thresholds())


def run(rank: int, transport: str, path: str) -> None:
    """Run as a rank that ``meshlib.spawn`` started; rank 0 writes the results to ``path``."""
    init_process_group("tcp")
    found = measure(transport)
    if rank == 0:
        Path(path).write_text(found.pack(), encoding="utf-8")
    destroy_process_group()
