"""A rank's part of a dim: ceiling division, once for each mesh dim that splits it.

A dim of ``length`` split by ``n`` has chunks of ``ceil(length / n)``; the last ones may be shorter
or empty. If several mesh dims split it, each chunk of the outer one is split again by the next.
torch's DTensor splits in the same way. So does JAX, whose arrays always divide evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlib._mesh.layout import IndexArray


def block(length: int, sizes: Sequence[int], coordinates: Sequence[int]) -> tuple[int, int]:
    """Return start and stop of the part at ``coordinates`` of a dim split by ``sizes``."""
    start = 0
    for size, coordinate in zip(sizes, coordinates, strict=True):
        chunk = -(-length // size)
        low = min(coordinate * chunk, length)
        start, length = start + low, min(chunk, length - low)
    return start, start + length


def blocks(length: int, sizes: Sequence[int]) -> tuple[IndexArray, IndexArray]:
    """Return starts and stops of all parts, int64, of shape ``sizes``."""
    start, left = np.zeros((), np.int64), np.full((), length, np.int64)
    for size in sizes:
        chunk = -(-left // size)[..., None]
        low = np.minimum(chunk * np.arange(size), left[..., None])
        start, left = start[..., None] + low, np.minimum(chunk, left[..., None] - low)
    return start, start + left


def overlap(
    length: int, mesh_shape: Sequence[int], left: Sequence[int], right: Sequence[int]
) -> tuple[IndexArray, list[int]]:
    """Return the length of each rank's overlap between two splits of a dim, and its mesh dims.

    ``left`` and ``right`` are the mesh dims (positions in ``mesh_shape``) that split the dim,
    outermost first. The lengths are int64, with a dim for each mesh dim in either split; the second
    result lists those mesh dims.
    """
    dims = sorted({*left, *right})
    starts_and_stops: list[tuple[IndexArray, IndexArray]] = []
    for split in (left, right):
        order = sorted(range(len(split)), key=lambda i: split[i])
        shape = [mesh_shape[m] if m in split else 1 for m in dims]
        start, stop = blocks(length, [mesh_shape[m] for m in split])
        starts_and_stops.append(
            (start.transpose(order).reshape(shape), stop.transpose(order).reshape(shape))
        )
    (a, b), (c, d) = starts_and_stops
    return np.maximum(np.minimum(b, d) - np.maximum(a, c), 0), dims


def shared_elements(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
) -> int:
    """Return the number of elements that a rank has in both of two shardings, summed over ranks.

    ``left`` and ``right`` have the mesh dims that split each dim of the array ``shape``. Each array
    dim is computed separately, so the cost depends on the mesh dims involved, not on all ranks.
    """
    bound = math.prod(shape) * math.prod(mesh_shape)
    terms: list[Any] = []
    used: set[int] = set()
    for length, a, b in zip(shape, left, right, strict=True):
        lengths, dims = overlap(length, mesh_shape, a, b)
        used.update(dims)
        # Python's integers are slower than int64, but do not overflow.
        terms += [lengths if bound < 2**62 else lengths.astype(object), dims]
    copies = math.prod(size for m, size in enumerate(mesh_shape) if m not in used)
    return copies * (int(np.einsum(*terms, [])) if terms else 1)
