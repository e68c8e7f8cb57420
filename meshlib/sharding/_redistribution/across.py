"""The plan from one mesh to another: messages from ranks that have a part to those that need it.

The meshes may share ranks. The source's mesh reduces partial values first. A rank never sends
itself anything, and receives each byte once. If the target has replicas, each replica receives
a piece, and the replicas gather the other pieces among themselves. If this costs more bytes,
because the target's ranks hold much of the array already, each rank receives its missing parts
directly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeVar

import numpy as np

from meshlib.sharding._blocks import blocks
from meshlib.sharding._local import Box, intersection, shape_of
from meshlib.sharding._redistribution.search import steps_within
from meshlib.sharding._redistribution.steps import POINT_TO_POINT, PlanStep, held_bytes
from meshlib.sharding._sharding_value import ShardingValue

S = TypeVar("S", bound=ShardingValue)


def steps_across(
    source: ShardingValue, target: ShardingValue, shape: Sequence[int], itemsize: int
) -> list[PlanStep]:
    """Return the steps from ``source`` to ``target``, which are on different meshes.

    Raises ValueError if one of the meshes is a slice of a larger mesh: each slice then has its own
    array.
    """
    for sharding in (source, target):
        if sharding.mesh.slice_count > 1:
            raise ValueError(
                f"{sharding.mesh} has {sharding.mesh.slice_count} slices, each with its own"
                " array; between meshes expected a mesh with one slice (make a DeviceMesh of it)"
            )
    shape = tuple(shape)
    reduced = spread(source, shape, [i for i, _ in source.partial_dims], keep=source.dims)
    arrived = target.reduced()
    before = steps_within(source, reduced, shape, itemsize)
    ways: list[tuple[int, int, list[PlanStep]]] = []
    for number, landing in enumerate(
        (spread(arrived, shape, arrived.replicated_dims, keep=arrived.dims), arrived)
    ):
        nbytes = held_bytes(landing, shape, itemsize) - _at_home(reduced, landing, shape, itemsize)
        message = PlanStep(POINT_TO_POINT, reduced, landing, (), None, nbytes)
        steps = [message, *steps_within(landing, target, shape, itemsize)]
        ways.append((sum(step.wire_bytes for step in steps), number, steps))
    return [*before, *min(ways)[2]]


@dataclass(frozen=True, slots=True)
class BoxMessage:
    """The part ``box`` of the global array, on its way between this rank and ``peer`` (global)."""

    peer: int
    box: Box


def messages_to(
    source: ShardingValue, target: ShardingValue, shape: Sequence[int], rank: int
) -> list[BoxMessage]:
    """Return the messages to ``rank``, for its part of ``target``, including one from itself."""
    coordinate = target.mesh.coordinate_of(rank)
    return [] if coordinate is None else list(_providers(source, target, tuple(shape), rank))


def messages_from(
    source: ShardingValue, target: ShardingValue, shape: Sequence[int], rank: int
) -> list[BoxMessage]:
    """Return the messages from ``rank``, of its part of ``source``, including one to itself."""
    if source.mesh.coordinate_of(rank) is None:
        return []
    mine = source.slices(shape, rank)
    sent: list[BoxMessage] = []
    for place in range(target.mesh.size()):
        other = target.mesh.rank_at(place)
        if intersection(mine, target.slices(shape, other)) is None:
            continue
        providers = _providers(source, target, tuple(shape), other)
        sent += [BoxMessage(other, message.box) for message in providers if message.peer == rank]
    return sent


@lru_cache(maxsize=4096)
def _providers(
    source: ShardingValue, target: ShardingValue, shape: tuple[int, ...], rank: int
) -> tuple[BoxMessage, ...]:
    """Return the sender of each piece of the part of ``rank``: itself if it has the piece.

    Receivers of the same part use different replicas of it, if there are several.
    """
    box = target.slices(shape, rank)
    own = None
    if source.mesh.coordinate_of(rank) is not None:
        own = source.slices(shape, rank)
    chosen = _copy_for(source, target, rank)
    found: list[BoxMessage] = []
    for coordinate, part in _parts_of(source, shape, box):
        keeps = own is not None and part == intersection(own, box)
        for i, at in chosen.items():
            coordinate[i] = at
        place = int(np.ravel_multi_index(coordinate, source.mesh.shape))
        found.append(BoxMessage(rank if keeps else source.mesh.rank_at(place), part))
    return tuple(found)


def _copy_for(source: ShardingValue, target: ShardingValue, rank: int) -> dict[int, int]:
    """Return the coordinates along the source's replicated dims of the copy that ``rank`` reads."""
    coordinate = target.mesh.coordinate_of(rank)
    assert coordinate is not None, "a receiver is in the target's mesh"
    number = int(np.ravel_multi_index(coordinate, target.mesh.shape)) % source.replica_count
    result: dict[int, int] = {}
    for i in reversed(source.replicated_dims):
        number, result[i] = divmod(number, source.mesh.shape[i])
    return result


def _parts_of(
    sharding: ShardingValue, shape: Sequence[int], box: Box
) -> Iterator[tuple[list[int], Box]]:
    """Yield the pieces of ``box`` that different ranks hold, with the ranks' coordinates.

    Coordinates along mesh dims that do not split anything are 0.
    """
    sizes = sharding.mesh.shape
    along: list[list[tuple[tuple[int, ...], slice]]] = []
    for d, (length, wanted) in enumerate(zip(shape, box, strict=True)):
        split = [sizes[i] for i in sharding.split_of(d)]
        starts, stops = blocks(length, split)
        hits: list[tuple[tuple[int, ...], slice]] = []
        for at in product(*map(range, split)):
            low, high = max(int(starts[at]), wanted.start), min(int(stops[at]), wanted.stop)
            if low < high:
                hits.append((at, slice(low, high)))
        along.append(hits)
    for chosen in product(*along):
        coordinate = [0] * len(sizes)
        for d, (at, _) in enumerate(chosen):
            for i, value in zip(sharding.split_of(d), at, strict=True):
                coordinate[i] = value
        yield coordinate, tuple(part for _, part in chosen)


def spread(
    sharding: S,
    shape: Sequence[int],
    mesh_dims: Sequence[int],
    keep: Sequence[tuple[int, ...]],
) -> S:
    """Return a sharding with the splits ``keep`` on the mesh of ``sharding``, nothing partial.

    ``mesh_dims`` then split the array dim with the longest parts.
    """
    sizes = sharding.mesh.shape
    dims = [keep[d] if d < len(keep) else () for d in range(len(shape))]
    if shape and mesh_dims:
        lengths = [
            length / prod(sizes[i] for i in dim) for length, dim in zip(shape, dims, strict=True)
        ]
        longest = lengths.index(max(lengths))
        dims[longest] = (*dims[longest], *mesh_dims)
    return sharding.of_positions(sharding.mesh, dims)


def _at_home(
    source: ShardingValue, target: ShardingValue, shape: Sequence[int], itemsize: int
) -> int:
    """Return the bytes of ``target`` that its ranks already have in ``source``."""
    kept = 0
    small, large = sorted((source.mesh, target.mesh), key=lambda mesh: mesh.size())
    for place in range(small.size()):
        rank = small.rank_at(place)
        if large.coordinate_of(rank) is None:
            continue
        both = intersection(source.slices(shape, rank), target.slices(shape, rank))
        if both is not None:
            kept += prod(shape_of(both))
    return kept * itemsize
