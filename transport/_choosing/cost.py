"""A cost model of the algorithms: bytes, reductions and time; docs/inside/algorithms.md as code.

The model is Hockney's ("The communication challenge for MPP", 1994) with a term for arithmetic:
a frame takes ``alpha`` seconds, a byte sent ``beta``, and a byte reduced ``gamma``. These costs add
up along the longest path. If ranks share cores, the total work divided by ``parallelism`` is a
second lower bound (Brent). Between hosts, the wire's delay is counted separately from a frame's
processor time, because frames sent back to back are delayed together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transport._calls.header import Kind
from transport._choosing.blocks import blocks_of, halving_steps
from transport._choosing.choice import ROUND_BYTES, Algorithm, Thresholds, levels_of
from transport._operands.flat import segments_of


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """The work of one collective.

    ``frames``, ``nbytes`` (sent) and ``reduced`` (bytes) are totals over all ranks. ``steps``,
    ``path_bytes`` and ``path_reduced`` count along the longest path. A high-latency link delays
    that path ``delays`` times, often fewer than ``steps``, because ranks send frames ahead.
    """

    algorithm: Algorithm
    steps: int
    frames: int
    path_bytes: float
    nbytes: float
    path_reduced: float = 0.0
    reduced: float = 0.0
    delays: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds for a frame (``alpha``), a byte sent (``beta``) and a byte reduced (``gamma``).

    ``parallelism`` is the number of ranks that can work at the same time.
    """

    alpha: float
    beta: float
    gamma: float
    parallelism: float

    def seconds(self, work: CollectiveCost, delay: float = 0.0) -> float:
        """Return the minimum seconds for ``work`` over links with ``delay`` seconds of latency."""
        together = self._add(work.frames, work.nbytes, work.reduced)
        return max(self.path_seconds(work) + delay * work.delays, together / self.parallelism)

    def path_seconds(self, work: CollectiveCost, turns: int = 1) -> float:
        """Return the seconds for the longest path, with each frame sent in ``turns`` pieces."""
        return self._add(turns * work.steps, work.path_bytes, work.path_reduced)

    def _add(self, frames: float, nbytes: float, reduced: float) -> float:
        return frames * self.alpha + nbytes * self.beta + reduced * self.gamma


def work_of(
    kind: Kind, nbytes: int, size: int, table: Thresholds, widening: int = 1
) -> CollectiveCost:
    """Return the work of the collective ``kind`` among ``size`` members, with the algorithm that
    ``table`` chooses.

    ``nbytes`` is the size of each member's input, or of the root's for a broadcast or a scatter.
    All parts of an input have equal sizes. ``widening`` is the item size of the reduction dtype
    divided by that of the array's dtype.
    """
    if size < 2:
        return CollectiveCost(Algorithm.DIRECT, 0, 0, 0, 0)
    return _FORMULAS[kind](nbytes, size, table, widening)


def _barrier(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    if table.barrier(n) is Algorithm.STAR:
        return _star(0, 0, n)
    steps = levels_of(n)
    return CollectiveCost(Algorithm.DISSEMINATION, steps, n * steps, 0, 0, delays=steps)


def _broadcast(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    algorithm = table.broadcast(nbytes, n)
    if algorithm is Algorithm.TREE:
        levels = levels_of(n)
        total = (n - 1) * nbytes
        return CollectiveCost(
            algorithm, levels, n - 1, levels * nbytes, total, delays=_floor_log2(n)
        )
    segments = 1 if n == 2 else segments_of(nbytes, table.segment)
    steps = segments + n - 2
    path, total = steps * nbytes / segments, (n - 1) * nbytes
    return CollectiveCost(algorithm, steps, (n - 1) * segments, path, total, delays=n - 1)


def _reduce(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    algorithm = table.reduce(nbytes, n)
    if algorithm is Algorithm.PARTS:
        rounds = segments_of(nbytes, ROUND_BYTES * n)
        parts = _reduce_scatter(nbytes // rounds, n, table, widening)
        gathered = _gather(nbytes // rounds // n, n, table, widening)
        return CollectiveCost(
            algorithm,
            rounds * (parts.steps + gathered.steps),
            rounds * (parts.frames + gathered.frames),
            rounds * (parts.path_bytes + gathered.path_bytes),
            rounds * (parts.nbytes + gathered.nbytes),
            rounds * parts.path_reduced,
            rounds * parts.reduced,
            rounds * (parts.delays + gathered.delays),
        )
    wide, levels = nbytes * widening, levels_of(n)
    chunks = segments_of(wide, table.segment)
    path, total = levels * wide, (n - 1) * wide
    return CollectiveCost(
        algorithm, chunks * levels, chunks * (n - 1), path, total, path, total, _floor_log2(n)
    )


def _all_reduce(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    algorithm = table.all_reduce(nbytes, n, narrow=widening > 1)
    wide = nbytes * widening
    match algorithm:
        case Algorithm.PAIRWISE:
            return _pairwise(nbytes, widening, n, segments_of(wide, table.segment * n), 2)
        case Algorithm.HALVING:
            return _halving(nbytes, n, 2)
        case _:
            return _whole(algorithm, wide, wide, n)


def _reduce_scatter(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    algorithm = table.reduce_scatter(nbytes, n, narrow=widening > 1)
    wide = nbytes * widening
    match algorithm:
        case Algorithm.PAIRWISE:
            return _pairwise(nbytes, widening, n, segments_of(-(-wide // n), table.segment), 1)
        case Algorithm.HALVING:
            return _halving(nbytes, n, 1)
        case _:
            return _whole(algorithm, wide, wide / n, n)


def _pairwise(nbytes: int, widening: int, n: int, chunks: int, passes: int) -> CollectiveCost:
    steps, total = passes * (n - 1) * chunks, passes * (n - 1) * nbytes
    reduced = (n - 1) * nbytes * widening
    algorithm = Algorithm.PAIRWISE
    return CollectiveCost(
        algorithm, steps, n * steps, total / n, total, reduced / n, reduced, passes
    )


def _halving(nbytes: int, n: int, passes: int) -> CollectiveCost:
    """Return the cost of halving: one pass to reduce, and a second pass to gather."""
    rounds = segments_of(nbytes, ROUND_BYTES)
    levels = [level for _, level in blocks_of(n)]
    frames = sum(level << level for level in levels) + sum(1 << level for level in levels[:-1])
    several = len(levels) > 1
    path = nbytes * (1 if several else (n - 1) / n)
    # In a reduce_scatter, the first block sends all other ranks their parts.
    handed = (n - (1 << levels[0])) if passes == 1 else 0
    return CollectiveCost(
        Algorithm.HALVING,
        rounds * (passes * halving_steps(n) + bool(handed)),
        rounds * (passes * frames + handed),
        passes * path + (nbytes / n if handed else 0),
        passes * (n - 1) * nbytes + handed * nbytes / n,
        path,
        (n - 1) * nbytes,
        rounds * (passes * halving_steps(n, apart=False) + bool(handed)),
    )


def _whole(algorithm: Algorithm, sent: float, returned: float, n: int) -> CollectiveCost:
    """Return the cost of reducing whole buffers of ``sent`` bytes; a star returns ``returned``."""
    if algorithm is Algorithm.STAR:
        return _star(sent, returned, n, sent)
    levels, total = levels_of(n), (n - 1) * sent
    if algorithm is Algorithm.DOUBLING:
        frames, path = levels * n, levels * sent
        return CollectiveCost(algorithm, levels, frames, path, n * path, path, n * path, levels)
    path, delays = levels * sent, 2 * _floor_log2(n)
    return CollectiveCost(
        algorithm, 2 * levels, 2 * (n - 1), 2 * path, 2 * total, path, total, delays
    )


def _all_gather(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    algorithm = table.all_gather(nbytes * n, n)
    if algorithm is Algorithm.STAR:
        return _star(nbytes, nbytes * n, n)
    steps = levels_of(n) if algorithm is Algorithm.BRUCK else n - 1
    total = n * (n - 1) * nbytes
    delays = 1 if algorithm is Algorithm.PAIRWISE else steps
    return CollectiveCost(algorithm, steps, n * steps, (n - 1) * nbytes, total, delays=delays)


def _gather(nbytes: float, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    total = (n - 1) * nbytes
    return CollectiveCost(Algorithm.DIRECT, n - 1, n - 1, total, total, delays=1)


def _scatter(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    return _gather(nbytes / n, n, table, widening)


def _all_to_all(nbytes: int, n: int, table: Thresholds, widening: int) -> CollectiveCost:
    total = (n - 1) * nbytes
    return CollectiveCost(Algorithm.PAIRWISE, n - 1, n * (n - 1), total / n, total, delays=1)


def _star(sent: float, returned: float, n: int, reduced: float = 0.0) -> CollectiveCost:
    """Return the cost if each member sends the centre ``sent`` bytes and receives ``returned``."""
    frames, nbytes = 2 * (n - 1), (n - 1) * (sent + returned)
    arithmetic = (n - 1) * reduced
    return CollectiveCost(Algorithm.STAR, frames, frames, nbytes, nbytes, arithmetic, arithmetic, 2)


def _floor_log2(n: int) -> int:
    return n.bit_length() - 1


_FORMULAS: dict[Kind, Callable[[int, int, Thresholds, int], CollectiveCost]] = {
    Kind.BARRIER: _barrier,
    Kind.BROADCAST: _broadcast,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE: _reduce,
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.GATHER: _gather,
    Kind.SCATTER: _scatter,
    Kind.ALL_TO_ALL: _all_to_all,
}
