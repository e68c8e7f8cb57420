"""The owners of parameters and their states, and the exchange of updated parameters."""

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
    """The shape and dtype of an array on another rank."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's states with ``Described`` in place of arrays."""
    return {
        name: Described(tuple(value.shape), np.dtype(value.dtype)) if _is_array(value) else value
        for name, value in values.items()
    }


def whole_nbytes(parameter: Parameter) -> int:
    """Return the number of bytes of a parameter, or of the global array that it is a part of."""
    if parameter.global_part is None:
        return parameter.data.nbytes
    return prod(parameter.global_part.shape) * parameter.data.dtype.itemsize


class StateLayouts:
    """The shardings of optimizer states over all slices of the mesh of ``ranks``.

    ``group`` is the group of ``ranks``; ``owner`` returns the group rank of a parameter's owner.
    The ranks at the same position in other slices own the parameter there: the same values, or
    another part if a layer has split it (tensor parallel).
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
        self._cached = cache(self._make)

    def sharding(self, parameter: Parameter, shape: tuple[int, ...]) -> Sharding:
        """Return the sharding of a state of ``parameter`` whose global array has ``shape``."""
        part = parameter.global_part
        split = part.sharding if part is not None and part.shape == shape else None
        own_device = "cpu" if isinstance(parameter.data, np.ndarray) else "cuda"
        return self._cached(self._owner(parameter), split, self._device or own_device)

    def _make(self, owner: int, split: Sharding | None, device: str) -> Sharding:
        owners = self._slices[:, owner]
        if split is None:
            return Sharding(DeviceMesh(device, owners))
        # The slices of the layer's mesh that consist of owners are copies of each other.
        rows = split.mesh.slices()
        inside = np.isin(rows, owners).reshape(len(rows), -1).all(axis=1)
        if np.count_nonzero(inside) * split.mesh.size() != owners.size:
            raise ValueError(
                f"a parameter has the sharding {split}, whose ranks {rows.tolist()} are not its"
                f" owners, {owners.tolist()}; expected a process_group that is a slice of the same"
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

    def as_global(
        self, parameter: Parameter, described: Mapping[str, Any], own: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return a parameter's states as global arrays; ``own`` are this rank's states, if any."""
        return {
            name: self._array(parameter, value, None if own is None else own[name])
            if isinstance(value, Described)
            else value
            for name, value in described.items()
        }

    def _array(self, parameter: Parameter, described: Described, local: Any) -> DArray:
        shape = described.shape
        if parameter.global_part is not None and shape == tuple(parameter.shape):
            shape = parameter.global_part.shape
        return DArray(local, self.sharding(parameter, shape), shape, described.dtype)

    def from_global(self, parameter: Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter's states: the inverse of ``as_global``.

        With DArrays, which may have any sharding, all ranks must call; on ranks that do not own the
        parameter, None replaces the arrays.
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
"""The size limit for the copies of an exchange, in bytes; a single parameter may exceed it."""


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return an owner for each of ``sizes`` that keeps ``loads`` (one per rank) balanced.

    Assigns the largest size first, each to the rank with the smallest load. By Graham's bound, the
    largest load is at most 4/3 of the best possible one. Updates ``loads``.
    """
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owner = loads.index(min(loads))
        owners[number] = owner
        loads[owner] += sizes[number]
    return owners


def check_group_rank(to: Any, group: ProcessGroup) -> None:
    """Raise TypeError unless ``to`` is an integer or None, ValueError unless it is a group rank."""
    if to is not None and not 0 <= to_whole_number(to, "to") < group.size():
        raise ValueError(f"to must be in [0, {group.size()}) or None, got {to}: {group}")


def collected(own: Any, group: ProcessGroup, to: int | None) -> list[Any] | None:
    """Return all members' ``own`` values on group rank ``to`` (None: on all ranks).

    A collective. Returns None on the other ranks.
    """
    if to is None:
        return gathered(own, group)
    parts: list[Any] | None = [None] * group.size() if to == group.rank() else None
    group.gather_object(own, parts, group_dst=to)
    return parts


class Shards:
    """Parameters of one dtype and device in one flat array, in the order of owners.

    With ``as_views``, the parameters become views of this array. Otherwise each exchange copies
    them through a temporary one.
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
        """Copy each parameter from its owner to all ranks, by one all-gather."""
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
    """Return the ``Shards`` of each dtype and device, in the same order on all ranks.

    With ``as_views``, there is one for each. Otherwise there may be several, to limit the size of
    their copies.
    """
    ranks = range(group.size())
    by_placement: dict[tuple[str, str], list[list[Parameter]]] = {}
    for parameter, owner in owners.items():
        by_owner = by_placement.setdefault(placement(parameter.data), [[] for _ in ranks])
        by_owner[owner].append(parameter)
    parts: list[Sequence[list[Parameter]]] = []
    for by_owner in by_placement.values():
        chunks = [[own] if as_views else _chunks(own, len(ranks)) for own in by_owner]
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
