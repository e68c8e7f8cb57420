"""The plan within a mesh: a cheapest path (Dijkstra 1959) in the graph of shardings.

Each edge is one step. An exchange leads from any sharding to any other with the same partial dims.
It is an all_to_all of the overlapping parts, over the mesh dims whose splits differ. It moves only
missing data, so no path has fewer bytes. At equal bytes the search prefers gathers and moves along
one array dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, takewhile
from math import prod

from meshlib.sharding._redistribution.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    LOCAL,
    PARTITION,
    REDUCE_SCATTER,
    SLICE,
    PlanStep,
    held_bytes,
    held_in_both,
)
from meshlib.sharding._sharding_value import ShardingValue

Cost = tuple[int, int, int, int]
"""Bytes on the wire, collectives, messages that a rank sends, steps."""


def steps_within(
    source: ShardingValue, target: ShardingValue, shape: Sequence[int], itemsize: int
) -> list[PlanStep]:
    """Return the cheapest steps from ``source`` to ``target``; both are on the same mesh."""
    search = _Search(target, tuple(shape), itemsize)
    numbers = count()
    queue: list[tuple[Cost, int, ShardingValue, tuple[PlanStep, ...]]] = []
    heappush(queue, ((0, 0, 0, 0), next(numbers), source, ()))
    done: set[ShardingValue] = set()
    limit = search.missing(source)
    while queue:
        cost, _, at, path = heappop(queue)
        if at == target:
            return list(path)
        if at in done:
            continue
        done.add(at)
        for step, own in search.edges(at):
            ahead = search.missing(step.target)
            # A path with more bytes than a single exchange cannot be the best.
            if limit is not None and ahead is not None and cost[0] + own[0] + ahead > limit:
                continue
            total = (cost[0] + own[0], cost[1] + own[1], cost[2] + own[2], cost[3] + own[3])
            heappush(queue, (total, next(numbers), step.target, (*path, step)))
    raise AssertionError(f"no path from {source} to {target}")


@dataclass(slots=True)
class _Search:
    target: ShardingValue
    shape: tuple[int, ...]
    itemsize: int

    def missing(self, at: ShardingValue) -> int | None:
        """Return the bytes that an exchange from ``at`` moves; None if none is possible."""
        if at.partial_dims != self.target.partial_dims:
            return None
        here = held_in_both(at, self.target, self.shape, self.itemsize)
        return held_bytes(self.target, self.shape, self.itemsize) - here

    def edges(self, at: ShardingValue) -> Iterator[tuple[PlanStep, Cost]]:
        """Yield the steps that may follow ``at``, with their costs."""
        for d in range(len(self.shape)):
            yield from self._slices(at, d)
            yield from self._gathers(at, d)
            yield from self._scatters(at, d)
        yield from self._partitions(at)
        yield from self._reductions(at)
        missing = self.missing(at)
        if missing is not None and at != self.target:
            dims = changed_dims(at, self.target)
            # If no changed dim splits the target, all ranks along these dims get the same data.
            split = {i for dim in self.target.dims for i in dim}
            kind = ALL_TO_ALL if split & set(dims) else ALL_GATHER
            step, cost = self._step(kind, at, self.target, dims, wire_bytes=missing)
            yield step, (*cost[:3], 2)

    def _step(
        self,
        kind: str,
        at: ShardingValue,
        to: ShardingValue,
        mesh_dims: Sequence[int],
        op: str | None = None,
        wire_bytes: int | None = None,
    ) -> tuple[PlanStep, Cost]:
        if kind in LOCAL:
            return PlanStep(kind, at, to, tuple(mesh_dims), op), (0, 0, 0, 1)
        if wire_bytes is None:
            size, both = self.itemsize, held_in_both(at, to, self.shape, self.itemsize)
            wire_bytes = held_bytes(to, self.shape, size) - both
        messages = prod(at.mesh.shape[i] for i in mesh_dims) - 1
        step = PlanStep(kind, at, to, tuple(mesh_dims), op, wire_bytes)
        return step, (wire_bytes, 1, messages, 1)

    def _next(self, at: ShardingValue, array_dim: int) -> tuple[int, ...]:
        """Return the mesh dims that must still split ``array_dim``; () if its split is wrong."""
        now, wanted = at.split_of(array_dim), self.target.split_of(array_dim)
        return wanted[len(now) :] if wanted[: len(now)] == now else ()

    def _slices(self, at: ShardingValue, d: int) -> Iterator[tuple[PlanStep, Cost]]:
        run = _leading(self._next(at, d), set(at.replicated_dims))
        if run:
            yield self._step(SLICE, at, _split(at, self.shape, d, at.split_of(d) + run), run)

    def _partitions(self, at: ShardingValue) -> Iterator[tuple[PlanStep, Cost]]:
        wanted, free = self.target.partial_dims, set(at.replicated_dims)
        # A partition comes last: partial values cannot be gathered, nor moved for fewer bytes.
        if at.dims != self.target.dims or not set(at.partial_dims) <= set(wanted):
            return
        for op in sorted({op for i, op in wanted if i in free}):
            new = [(i, own) for i, own in wanted if i in free and own == op]
            to = at.of_positions(at.mesh, at.dims, (*at.partial_dims, *new))
            yield self._step(PARTITION, at, to, [i for i, _ in new], op)

    def _gathers(self, at: ShardingValue, d: int) -> Iterator[tuple[PlanStep, Cost]]:
        now, wanted = at.split_of(d), self.target.split_of(d)
        for left in range(len(_common(now, wanted)), len(now)):
            moved, rest = now[left:], _split(at, self.shape, d, now[:left])
            yield self._step(ALL_GATHER, at, rest, moved)
            for other in range(len(self.shape)):
                following = self._next(at, other)
                if other != d and following[: len(moved)] == moved:
                    to = _split(rest, self.shape, other, at.split_of(other) + moved)
                    yield self._step(ALL_TO_ALL, at, to, moved)

    def _scatters(self, at: ShardingValue, d: int) -> Iterator[tuple[PlanStep, Cost]]:
        for op in {op for i, op in at.partial_dims if (i, op) not in self.target.partial_dims}:
            pending = {i for i, own in at.partial_dims if own == op}
            run = _leading(self._next(at, d), pending)
            for dims in [run] if run else [(i,) for i in sorted(pending)]:
                partial = [(i, own) for i, own in at.partial_dims if i not in dims]
                to = _split(at, self.shape, d, at.split_of(d) + dims, partial)
                less = held_bytes(to, self.shape, self.itemsize)
                sent = held_bytes(at, self.shape, self.itemsize) - less
                yield self._step(REDUCE_SCATTER, at, to, dims, op, sent)

    def _reductions(self, at: ShardingValue) -> Iterator[tuple[PlanStep, Cost]]:
        for op in {op for i, op in at.partial_dims if (i, op) not in self.target.partial_dims}:
            wanted = set(self.target.partial_dims)
            pending = [i for i, own in at.partial_dims if own == op and (i, op) not in wanted]
            free = set(self.target.replicated_dims)
            for dims in {tuple(pending), tuple(i for i in pending if i in free)} - {()}:
                partial = [(i, own) for i, own in at.partial_dims if i not in dims]
                to = at.of_positions(at.mesh, at.dims, partial)
                held = held_bytes(at, self.shape, self.itemsize)
                n = prod(at.mesh.shape[i] for i in dims)
                yield self._step(ALL_REDUCE, at, to, dims, op, 2 * (n - 1) * held // n)


def changed_dims(a: ShardingValue, b: ShardingValue) -> tuple[int, ...]:
    """Return the mesh dims that do not split the same part of the same array dim in both."""
    same: set[int] = set()
    for left, right in zip(a.dims, b.dims, strict=False):
        same.update(_common(left, right))
    used = {i for sharding in (a, b) for dim in sharding.dims for i in dim}
    return tuple(sorted(used - same))


def _leading(dims: tuple[int, ...], among: set[int]) -> tuple[int, ...]:
    """Return the longest prefix of ``dims`` whose items are all in ``among``."""
    return tuple(takewhile(among.__contains__, dims))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the longest common prefix."""
    return tuple(i for i, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _split(
    at: ShardingValue,
    shape: Sequence[int],
    array_dim: int,
    mesh_dims: tuple[int, ...],
    partial: Sequence[tuple[int, str]] | None = None,
) -> ShardingValue:
    """Return ``at`` with one array dim split by other mesh dims."""
    dims = [at.split_of(d) for d in range(len(shape))]
    dims[array_dim] = mesh_dims
    return at.of_positions(at.mesh, dims, at.partial_dims if partial is None else partial)
