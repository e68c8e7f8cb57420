"""Neighbours on a mesh: who they are, and the ghost cells that they exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib._mesh.names import DimKey
from transport._checks import to_whole_number

if TYPE_CHECKING:
    from meshlib._calls.work import Work
    from meshlib._mesh.device_mesh import DeviceMesh


def neighbours(
    mesh: DeviceMesh, dim: DimKey, distance: int, *, periodic: bool
) -> tuple[int | None, int | None]:
    """Return the places before and behind this rank's along ``dim``. See ``DeviceMesh.shift``."""
    place, size = mesh.get_local_rank(dim), mesh[dim].size()
    found = place - distance, place + distance
    if periodic:
        return found[0] % size, found[1] % size
    before, behind = (at if 0 <= at < size else None for at in found)
    return before, behind


def exchange_halo(
    mesh: DeviceMesh,
    array: np.ndarray[Any, Any],
    dims: Mapping[DimKey, int],
    width: int,
    periodic: bool | Mapping[DimKey, bool],
) -> None:
    """Fill the ghost cells of ``array``. See ``DeviceMesh.exchange_halo``."""
    for dim, axis, around in _checked(mesh, array, dims, width, periodic):
        # The faces of the second axis contain the ghost cells of the first one: so corners come.
        faces = np.moveaxis(array, axis, 0)
        row = mesh[dim]
        before, behind = neighbours(mesh, dim, 1, periodic=around)
        if row.size() == 1:
            if around:
                faces[:width], faces[-width:] = faces[-2 * width : -width], faces[width : 2 * width]
            continue
        works: list[Work[Any]] = []
        for peer, inner, ghosts, down in (
            (before, faces[width : 2 * width], faces[:width], 1),
            (behind, faces[-2 * width : -width], faces[-width:], 0),
        ):
            if peer is not None:  # with two ranks around, one is both: the tag says which way
                works.append(row.irecv(ghosts, group_src=peer, tag=1 - down))
                works.append(row.isend(inner, group_dst=peer, tag=down))
        for work in works:
            work.wait()


def _checked(
    mesh: DeviceMesh,
    array: np.ndarray[Any, Any],
    dims: Mapping[DimKey, int],
    width: int,
    periodic: bool | Mapping[DimKey, bool],
) -> Iterator[tuple[DimKey, int, bool]]:
    """Check all arguments; return each dim with its axis and whether it closes to a ring."""
    if not isinstance(array, np.ndarray) or not array.flags.writeable:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"array must be a NumPy array that can be written to, got {type(array).__name__};"
            " for JAX arrays see meshlib.jit.exchange_halo"
        )
    width = to_whole_number(width, "width")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if not isinstance(dims, Mapping) or not dims:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f'dims must map dims to axes, as {{"y": 0, "x": 1}}, got {dims!r}')
    found: list[tuple[DimKey, int, bool]] = []
    axes: set[int] = set()
    for dim, named in dims.items():
        mesh[dim]  # raises MeshDimError for a dim that is not there
        axis = to_whole_number(named, f"dims[{dim!r}]")
        if not -array.ndim <= axis < array.ndim or axis % array.ndim in axes:
            raise ValueError(
                f"dims[{dim!r}] is axis {axis}; expected an axis of the array's {array.ndim},"
                " each once"
            )
        axes.add(axis % array.ndim)
        if array.shape[axis] < 3 * width:
            raise ValueError(
                f"array has {array.shape[axis]} cells along axis {axis}; expected at least"
                f" {3 * width}: a width of {width} at both ends, and as much between"
            )
        around = periodic if isinstance(periodic, bool) else bool(periodic.get(dim, False))
        found.append((dim, axis, around))
    return iter(found)
