"""Timing of communicators' calls, by the slowest rank."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np

from meshlib._c10d.functions.arrays import all_reduce
from transport._calls.call import Call
from transport._calls.codes import dtype_code
from transport._calls.header import NO_ROOT, CallHeader, Kind
from transport._communicators.base import Communicator
from transport._operands.reduce_op import ReduceOp
from transport._waiting.deadline import Deadline

_SECONDS = 120.0
_FEWEST, _MOST = 4, 40
_BLOCK_BYTES = 8 << 20
_FLOAT = np.dtype(np.float32)
Run = Callable[[Call], None]


class CallIssuer:
    """An issuer of calls on ``communicator``, with the numbers that a group would use."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._numbers = itertools.count(1)

    def call(self, kind: Kind) -> Call:
        """Return the next call."""
        header = CallHeader(next(self._numbers), 0, NO_ROOT, kind, dtype_code(_FLOAT), 0)
        return Call(header, Deadline.after(_SECONDS))

    def prepare(self, kind: Kind, nbytes: int) -> Run:
        """Return a function that makes a call of ``kind`` on ``nbytes`` of float32.

        If members have parts, ``nbytes`` is the size of all parts together.
        """
        comm, n = self.communicator, self.communicator.size
        count = max(1, nbytes // _FLOAT.itemsize)
        whole = np.zeros(count, _FLOAT)
        parts = [np.zeros(max(1, count // n), _FLOAT) for _ in range(n)]
        own = np.zeros(parts[0].size, _FLOAT)
        runs: dict[Kind, Run] = {
            Kind.BARRIER: comm.barrier,
            Kind.ALL_REDUCE: lambda call: comm.all_reduce(call, whole, ReduceOp.SUM),
            Kind.BROADCAST: lambda call: comm.broadcast(call, whole, 0),
            Kind.REDUCE: lambda call: comm.reduce(call, whole, ReduceOp.SUM, 0),
            Kind.ALL_GATHER: lambda call: comm.all_gather(call, parts, own),
            Kind.REDUCE_SCATTER: lambda call: comm.reduce_scatter(call, own, parts, ReduceOp.SUM),
        }
        return runs[kind]

    def times(self, kind: Kind, run: Run, nbytes: int) -> list[float]:
        """Return the slowest rank's seconds for each repetition."""
        repetitions = max(_FEWEST, min(_MOST, _BLOCK_BYTES // max(nbytes, 1)))
        seconds = np.zeros(repetitions)
        for turn in range(-1, repetitions):  # the first is a warm-up
            self.communicator.barrier(self.call(Kind.BARRIER))
            call = self.call(kind)
            began = time.perf_counter()
            run(call)
            if turn >= 0:
                seconds[turn] = time.perf_counter() - began
        all_reduce(seconds, ReduceOp.MAX)
        return seconds.tolist()


def interleaved(issuers: list[CallIssuer], kind: Kind, nbytes: int, rounds: int = 4) -> list[float]:
    """Return the median seconds of ``kind`` on ``nbytes`` for each of ``issuers``.

    The issuers alternate, so that other load on the machine affects all of them.
    """
    runs = [issuer.prepare(kind, nbytes) for issuer in issuers]
    seconds: list[list[float]] = [[] for _ in issuers]
    for round_ in range(rounds):
        order = range(len(issuers)) if round_ % 2 == 0 else reversed(range(len(issuers)))
        for number in order:
            seconds[number] += issuers[number].times(kind, runs[number], nbytes)
    return [statistics.median(times) for times in seconds]
