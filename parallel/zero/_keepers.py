"""On which ranks the states of a parameter lie, as global arrays: on those of its owners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from meshlib import DeviceMesh, ProcessGroup
from meshlib.sharding import DArray, Sharding
from parallel._groups import Ranks
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
        self, group: ProcessGroup, ranks: Ranks | None, owner: Callable[[Parameter], int]
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
        self, parameter: Parameter, told: Mapping[str, Any], mine: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return a parameter's states as global arrays; ``mine`` are those that this rank has."""
        return {
            name: self._array(parameter, value, None if mine is None else mine[name])
            if isinstance(value, Described)
            else value
            for name, value in told.items()
        }

    def _array(self, parameter: Parameter, told: Described, local: Any) -> DArray:
        shape = told.shape
        if parameter.global_part is not None and shape == tuple(parameter.shape):
            shape = parameter.global_part.shape
        return DArray(local, self.sharding(parameter, shape), shape, told.dtype)

    def take(self, parameter: Parameter, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what this rank keeps of a parameter's states: the inverse of ``give``.

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
