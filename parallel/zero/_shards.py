"""The owner of each parameter, which keeps its states, and the exchange of updated parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from meshlib import DeviceMesh, ProcessGroup
from meshlib.extend import to_whole_number
from meshlib.sharding import DArray, Sharding
from parallel._arrays import Array, namespace, pieces, placement
from parallel._core.assignment import MIB
from parallel._groups import GroupLike, gathered
from parallel.nn._parameter import Parameter


@dataclass(frozen=True)
class Described:
    """An array that another rank has."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's states with ``Described`` in the place of arrays."""
    return {
        name: Described(tuple(value.shape), np.dtype(value.dtype)) if _is_array(value) else value
        for name, value in values.items()
    }


def whole_nbytes(parameter: Parameter) -> int:
    """Return the bytes of a parameter, or of the global array that it is a part of."""
    if parameter.global_part is None:
        return parameter.data.nbytes
    return prod(parameter.global_part.shape) * parameter.data.dtype.itemsize


class Keepers:
    """The owners of parameters, in all slices of the mesh that ``ranks`` is a slice of.

    ``group`` is that of ``ranks``; ``owner`` returns the group rank of a parameter's owner. Those
    at the same place in other slices own the same parameter there: the same part of it, or, where a
    layer has split it (tensor parallel), another one.
    """

    def __init__(
        self, group: ProcessGroup, ranks: GroupLike | None, owner: Callable[[Parameter], int]
    ) -> None:
        self._owner = owner
        self._device: str | None = None
        if isinstance(ranks, DeviceMesh):
            self._device = ranks.device_type
            self._slices = ranks.slices().reshape(ranks.slice_count, -1)
        else:
            self._slices = np.array([group.ranks])
        self._made = cache(self._make)

    def sharding(self, parameter: Parameter, shape: tuple[int, ...]) -> Sharding:
        """Return how a state of ``parameter`` lies that has ``shape`` as a global array."""
        part = parameter.global_part
        split = part.sharding if part is not None and part.shape == shape else None
        own_device = "cpu" if isinstance(parameter.data, np.ndarray) else "cuda"
        return self._made(self._owner(parameter), split, self._device or own_device)

    def _make(self, owner: int, split: Sharding | None, device: str) -> Sharding:
        keepers = self._slices[:, owner]
        if split is None:
            return Sharding(DeviceMesh(device, keepers))
        # The slices of the layer's mesh that have keepers alone: copies of each other.
        rows = split.mesh.slices()
        inside = np.isin(rows, keepers).reshape(len(rows), -1).all(axis=1)
        if np.count_nonzero(inside) * split.mesh.size() != keepers.size:
            raise ValueError(
                f"a parameter lies as {split}, whose ranks {rows.tolist()} are not those of its"
                f" owners, {keepers.tolist()}; expected a process_group that is a slice of the same"
                " mesh, such as mesh['dp']"
            )
        names = split.mesh.mesh_dim_names
        copies = "copies"
        while names is not None and copies in names:
            copies += "_"
        mesh = DeviceMesh(
            device,
            rows[inside],
            mesh_dim_names=None if names is None else (copies, *names),
        )
        dims = [tuple(i + 1 for i in dim) for dim in split.dims]
        return Sharding.of_positions(mesh, dims)

    def give(
        self, parameter: Parameter, known: Mapping[str, Any], mine: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return a parameter's states as global arrays; ``mine`` are those that this rank has."""
        return {
            name: self._array(parameter, value, None if mine is None else mine[name])
            if isinstance(value, Described)
            else value
            for name, value in known.items()
        }

    def _array(self, parameter: Parameter, known: Described, local: Any) -> DArray:
        shape = known.shape
        if parameter.global_part is not None and shape == tuple(parameter.shape):
            shape = parameter.global_part.shape
        return DArray(local, self.sharding(parameter, shape), shape, known.dtype)

    def take(self, parameter: Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's states: the inverse of ``give``.

        All ranks call where there are DArrays, which may lie in any way; on ranks that keep nothing
        of the parameter None is in their place.
        """
        return {
            name: value.redistribute(self.sharding(parameter, value.shape)).to_local()
            if isinstance(value, DArray)
            else value
            for name, value in values.items()
        }


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


_COPIED_BYTES = 64 * MIB
"""The limit of an exchange's copies, in bytes; the largest parameter may exceed it."""


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return an owner for each of ``sizes``, so that ``loads`` (one a rank) stay balanced.

    The largest first, each to the rank with the least (Graham's rule: no rank gets more than 4/3
    of what the best assignment gives the fullest one). ``loads`` is updated. A parameter is never
    split, so one that is larger than all others together is somebody's alone.
    """
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += sizes[number]
    return owners


def check_group_rank(to: Any, group: ProcessGroup) -> None:
    """Raise TypeError unless ``to`` is a whole number or None, ValueError for no rank of it."""
    if to is not None and not 0 <= to_whole_number(to, "to") < group.size():
        raise ValueError(f"to must be in [0, {group.size()}), or be None, got {to}: {group}")


def collected(own: Any, group: ProcessGroup, to: int | None) -> list[Any] | None:
    """Return the ``own`` of all members on group rank ``to`` (None: on all); elsewhere None.

    A collective.
    """
    if to is None:
        return gathered(own, group)
    parts: list[Any] | None = [None] * group.size() if to == group.rank() else None
    group.gather_object(own, parts, group_dst=to)
    return parts


class Shards:
    """Parameters of one dtype and device, in one flat array, owner after owner.

    With ``as_views`` the parameters live in that array for good; without, they are copied through
    one that lives as long as the exchange.
    """

    def __init__(
        self, by_owner: Sequence[Sequence[Parameter]], group: ProcessGroup, *, as_views: bool
    ) -> None:
        self._group = group
        self._by_owner = by_owner
        self._like = next(parameter.data for part in by_owner for parameter in part)
        sizes = [sum(parameter.size for parameter in part) for part in self._by_owner]
        self._ends = [0, *itertools.accumulate(sizes)]
        self._flat: Array = None
        if as_views:
            self._flat = self._allocate()
            for rank in range(group.size()):
                for parameter, view in self._views(rank, self._flat):
                    view[...] = parameter.data
                    parameter.data = view

    def exchange(self) -> None:
        """Make all parameters equal to those of their owners. One all-gather."""
        if self._group.size() == 1:
            return
        me = self._group.rank()
        flat = self._flat
        if flat is None:
            flat = self._allocate()
            for parameter, view in self._views(me, flat):
                view[...] = parameter.data
        rows = [flat[begin:end] for begin, end in itertools.pairwise(self._ends)]
        self._group.all_gather(rows, rows[me])
        if self._flat is None:
            for rank in range(self._group.size()):
                if rank != me:
                    for parameter, view in self._views(rank, flat):
                        parameter.data[...] = view

    def _allocate(self) -> Array:
        return namespace(self._like).empty(self._ends[-1], dtype=self._like.dtype)

    def _views(self, rank: int, flat: Array) -> list[tuple[Parameter, Array]]:
        part = self._by_owner[rank]
        views = pieces(flat, (parameter.shape for parameter in part), self._ends[rank])
        return list(zip(part, views, strict=True))


def shards_by_placement(
    owners: Mapping[Parameter, int], group: ProcessGroup, *, as_views: bool
) -> list[Shards]:
    """Return the ``Shards`` for each dtype and device, in an order that all ranks share.

    With ``as_views`` one, otherwise as many as keep what each copies small.
    """
    ranks = range(group.size())
    piles: dict[tuple[str, str], list[list[Parameter]]] = {}
    for parameter, owner in owners.items():
        piles.setdefault(placement(parameter.data), [[] for _ in ranks])[owner].append(parameter)
    parts: list[Sequence[list[Parameter]]] = []
    for pile in piles.values():
        chunks = [[own] if as_views else _chunks(own, len(ranks)) for own in pile]
        parts += itertools.zip_longest(*chunks, fillvalue=[])
    return [Shards(part, group, as_views=as_views) for part in parts]


def _chunks(parameters: Sequence[Parameter], ranks: int) -> Iterator[list[Parameter]]:
    chunk: list[Parameter] = []
    nbytes = 0
    for parameter in parameters:
        size = int(parameter.data.nbytes)
        if chunk and nbytes + size > _COPIED_BYTES // ranks:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append(parameter)
        nbytes += size
    if chunk:
        yield chunk
