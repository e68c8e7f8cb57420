"""The chunks of an array and the rank that writes each; all ranks compute the same plan.

Chunks follow the shards, so a rank writes its own data and each chunk has one writer. If several
ranks have equal values (replicas), their part is cut into chunks, and each chunk is assigned to the
replica with the fewest bytes so far.

All chunks of a grid have one size. One mesh dim splits an array dim into equal parts, except for
the last. Several mesh dims may split it unevenly; such parts are first gathered to the split of the
outermost mesh dim.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from meshlib._mesh.device_mesh import DeviceMesh
from meshlib.checkpoint._files.zarr import ChunkGrid
from meshlib.sharding._blocks import blocks
from meshlib.sharding._sharding import Sharding

MOST_BYTES = 16 << 20
"""The largest size of a chunk, where it can be cut. It limits the bytes read to check a part."""

LEAST_BYTES = 1 << 20
"""The smallest share of an array that a replica writes."""

Index = tuple[int, ...]


def aligned(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """Return ``sharding``, reduced, or the nearest sharding with a regular grid of parts."""
    landed = sharding.reduced()
    dims = [
        split if _unit(landed, d, length) else split[:1]
        for d, (split, length) in enumerate(zip(landed.dims, shape, strict=False))
    ]
    return Sharding.of_positions(landed.mesh, dims)


def _unit(sharding: Sharding, d: int, length: int) -> int:
    """Return a length of chunks along dim ``d`` with which no chunk spans two parts.

    Returns 0 if that would make too many chunks.
    """
    sizes = [sharding.mesh.shape[i] for i in sharding.split_of(d)]
    if not sizes or not length:
        return max(length, 1)
    if len(sizes) == 1 or length % math.prod(sizes) == 0:
        return -(-length // math.prod(sizes))
    starts, stops = blocks(length, sizes)
    begin = starts[starts < stops]
    unit = int(np.gcd.reduce(begin)) or length
    return unit if -(-length // unit) <= 2 * begin.size else 0


def chunked(
    shape: Sequence[int], dtype: np.dtype[np.generic], sharding: Sharding | None, writers: int
) -> ChunkGrid:
    """Return the chunks of an array with the ``aligned`` sharding ``sharding``.

    Each part of the array has ``writers`` replicas.
    """
    split = [bool(sharding and sharding.split_of(d)) for d in range(len(shape))]
    chunk = [
        _unit(sharding, d, length) if sharding is not None and split[d] else max(length, 1)
        for d, length in enumerate(shape)
    ]
    nbytes = math.prod(chunk) * dtype.itemsize
    pieces = max(-(-nbytes // MOST_BYTES), min(writers, nbytes // LEAST_BYTES))
    for d, length in enumerate(chunk):
        if pieces <= 1:
            break
        # A chunk must end at the boundary of two parts, but not at the end of the array.
        count = _divisor(length, pieces) if split[d] else min(pieces, length)
        chunk[d] = -(-length // count)
        pieces = -(-pieces // count)
    return ChunkGrid(tuple(shape), tuple(chunk), dtype)


def _divisor(length: int, wanted: int) -> int:
    """Return a divisor of ``length``: the next one above ``wanted`` if near, else one below."""
    above = [n for n in range(wanted, min(4 * wanted, length) + 1) if length % n == 0]
    below = (n for n in range(min(wanted, length), 0, -1) if length % n == 0)
    return above[0] if above else next(below)


class Writers:
    """A distribution of chunks among the ranks that have equal values.

    Each rank has its own object, and must pass the same arrays in the same order.
    """

    def __init__(self, group_ranks: Sequence[int], rank: int) -> None:
        self._all_ranks = tuple(group_ranks)
        self._rank = rank
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._sharing: dict[tuple[DeviceMesh, tuple[int, ...]], tuple[int, ...]] = {}

    def sharing(self, sharding: Sharding | None) -> tuple[int, ...]:
        """Return the ranks that have the same part as this rank; empty outside of the mesh.

        These include the ranks at the same coordinate of other slices, because with a sharding on
        ``mesh["tp"]`` all slices have the same array.
        """
        if sharding is None:
            return self._all_ranks
        mesh, free = sharding.mesh, sharding.replicated_dims
        known = self._sharing.get((mesh, free))
        if known is None:
            at = mesh.coordinate_of(self._rank)
            if at is None:
                return ()
            place = tuple(slice(None) if i in free else at[i] for i in range(mesh.ndim))
            ranks = mesh.slices()[(slice(None), *place)].ravel().tolist()
            known = self._sharing[mesh, free] = tuple(sorted(ranks))
        return known

    def assign_chunks(self, grid: ChunkGrid, sharding: Sharding | None) -> Iterator[Index]:
        """Yield the chunks of an array that this rank writes."""
        ranks = self.sharing(sharding)
        if not ranks:
            return
        box = grid.whole if sharding is None else sharding.slices(grid.shape, self._rank)
        loads = self._loads.setdefault(ranks, [(0, rank) for rank in ranks])
        for index in grid.overlapping(box):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + grid.chunk_bytes, rank))
            if rank == self._rank:
                yield index


def members_outside(shardings: Iterable[Sharding | None], ranks: Sequence[int]) -> list[int]:
    """Return the ranks of the shardings' meshes that are not among ``ranks``."""
    known = set(ranks)
    meshes = {sharding.mesh for sharding in shardings if sharding is not None}
    return sorted({int(r) for mesh in meshes for r in mesh.slices().ravel()} - known)
