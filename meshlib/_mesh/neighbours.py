"""Neighbours along the dims of a mesh, and their exchange of ghost cells."""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib._arrays.checks import check_fillable, check_list
from meshlib._calls.work import Work
from meshlib._collectives.collectives import Collectives
from meshlib._groups.process_group import ProcessGroup
from meshlib._mesh.names import DimKey
from meshlib._mesh.value import MeshValue
from transport._checks import to_whole_number
from transport._waiting.deadline import Timeout


class MeshOfNeighbours(MeshValue, Collectives):
    """A mesh whose ranks know their neighbours along each dim."""

    def shift(
        self, dim: DimKey, distance: int = 1, *, periodic: bool = False
    ) -> tuple[int | None, int | None]:
        """Return the global ranks (source, destination) of a shift by ``distance`` along ``dim``.

        The source is ``distance`` places before this rank, the destination as many places behind
        it; each is None beyond an edge of the mesh. A ``periodic`` dim is a ring, without edges. A
        negative ``distance`` shifts the other way.

        Raises MeshDimError (a ValueError) for an unknown dim, ValueError on a rank outside of the
        mesh, TypeError for a ``distance`` that is not an integer.
        """
        distance = to_whole_number(distance, "distance")
        group, source, destination = self._neighbours(dim, distance, periodic=periodic)
        ranks = group.ranks
        return (
            None if source is None else ranks[source],
            None if destination is None else ranks[destination],
        )

    def exchange_halo(
        self,
        array: npt.NDArray[Any],
        dims: Mapping[DimKey, int],
        width: int = 1,
        *,
        periodic: bool | Mapping[DimKey, bool] = False,
    ) -> npt.NDArray[Any]:
        """Fill the ghost cells of ``array`` with the neighbours' cells; return ``array``.

        Each rank has a block of a larger grid, with ``width`` ghost cells at both ends of each axis
        in ``dims``, such as ``{"y": 0, "x": 1}``: the axis along each dim of the mesh. A face of
        ``width`` inner cells is sent to the neighbour on that side, into its ghost cells. Dims are
        exchanged one after another, so ghost cells at edges and corners come from the diagonal
        neighbours. Ghost cells beyond an edge of the mesh keep their values, unless the dim is
        ``periodic`` (one bool, or one for each dim).

        All ranks must call it, with equal arguments and matching shapes. Inside ``jax.jit``, call
        ``meshlib.jit.exchange_halo``.

        Raises TypeError for a value that is not a writable NumPy array. Raises ValueError for a
        ``width`` below 1, for a wrong axis, and for an axis with fewer than ``3 * width`` cells.
        Raises MeshDimError (a ValueError) for an unknown dim, and the errors of ``isend`` and
        ``irecv``.
        """
        if not isinstance(array, np.ndarray) or not array.flags.writeable:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"array must be a NumPy array that can be written to, got {type(array).__name__};"
                " for JAX arrays see meshlib.jit.exchange_halo"
            )
        for dim, axis, around in check_halo(self, array.shape, dims, width, periodic):
            # Faces of later axes include the ghost cells of earlier ones, which fills the corners.
            faces = np.moveaxis(array, axis, 0)
            group, before, behind = self._neighbours(dim, 1, periodic=around)
            if group.size() == 1:
                if around:
                    faces[:width] = faces[-2 * width : -width]
                    faces[-width:] = faces[width : 2 * width]
                continue
            works: list[Work[Any]] = []
            for peer, inner, ghosts, down in (
                (before, faces[width : 2 * width], faces[:width], 1),
                (behind, faces[-2 * width : -width], faces[-width:], 0),
            ):
                if peer is not None:  # one rank is both neighbours in a ring of two: tags tell them
                    works.append(group.irecv(ghosts, group_src=peer, tag=1 - down))
                    works.append(group.isend(inner, group_dst=peer, tag=down))
            for work in works:
                work.wait()
        return array

    def neighbor_all_gather(
        self,
        outputs: MutableSequence[Any],
        tensor: Any,
        *,
        periodic: bool | Mapping[DimKey, bool] = False,
        timeout: Timeout | None = None,
    ) -> MutableSequence[Any]:
        """Send ``tensor`` to all neighbours, and fill ``outputs`` with theirs; return ``outputs``.

        As ``MPI_Neighbor_allgather`` on a grid: ``neighbor_all_to_all`` of equal inputs.
        """
        inputs = [tensor] * (2 * self.ndim)
        return self.neighbor_all_to_all(outputs, inputs, periodic=periodic, timeout=timeout)

    def neighbor_all_to_all(
        self,
        outputs: MutableSequence[Any],
        inputs: Sequence[Any],
        *,
        periodic: bool | Mapping[DimKey, bool] = False,
        timeout: Timeout | None = None,
    ) -> MutableSequence[Any]:
        """Send each neighbour its entry of ``inputs``, and fill ``outputs`` with theirs.

        As ``MPI_Neighbor_alltoall`` on a grid. Both lists have two arrays for each dim of the mesh,
        in the order of the dims: for the neighbour one place before, then for the one behind. An
        input has the size and dtype of the neighbour's output for this rank. Beyond an edge the
        input is not sent and the output is unchanged, unless the dim is ``periodic`` (one bool, or
        one for each dim).

        All ranks of the mesh must call it. Returns ``outputs``, with new arrays in place of
        read-only ones. ``timeout`` applies to each message; the default is the dim's.

        Raises TypeError for a value that is not a list, ValueError for a wrong number of entries
        and on a rank outside of the mesh. Raises the errors of ``isend`` and ``irecv``.
        """
        each = "two for each dim of the mesh"
        check_fillable(outputs, "outputs")
        check_list(outputs, "outputs", 2 * self.ndim, each)
        check_list(inputs, "inputs", 2 * self.ndim, each)
        received: dict[int, Work[Any]] = {}
        sent: list[Work[None]] = []
        for place in range(2 * self.ndim):
            number, side = divmod(place, 2)
            dim = number if self.mesh_dim_names is None else self.mesh_dim_names[number]
            group, *ends = self._neighbours(dim, 1, periodic=_is_ring(periodic, dim))
            peer = ends[side]
            if peer is not None:  # one rank is both neighbours in a ring of two: tags tell them
                received[place] = group.irecv(
                    outputs[place], group_src=peer, tag=1 - side, timeout=timeout
                )
                work = group.isend(inputs[place], group_dst=peer, tag=side, timeout=timeout)
                sent.append(work)
        for place, work in received.items():
            outputs[place] = work.result()
        for work in sent:
            work.wait()
        return outputs

    def _neighbours(
        self, dim: DimKey, distance: int, *, periodic: bool
    ) -> tuple[ProcessGroup, int | None, int | None]:
        """Return this rank's group along ``dim``, and the neighbours' ranks in that group."""
        group = self[dim].process_group
        assert isinstance(group, ProcessGroup)
        place, size = group.rank(), group.size()
        if place < 0:
            raise ValueError(f"rank {group.global_rank} is not in {self}")
        found = place - distance, place + distance
        if periodic:
            return group, found[0] % size, found[1] % size
        before, behind = (at if 0 <= at < size else None for at in found)
        return group, before, behind


def check_halo(
    mesh: MeshValue,
    shape: Sequence[int],
    dims: Mapping[DimKey, int],
    width: int,
    periodic: bool | Mapping[DimKey, bool],
) -> list[tuple[DimKey, int, bool]]:
    """Check the arguments of ``exchange_halo`` for an array of ``shape``.

    Returns each dim, its axis counted from 0, and whether it closes to a ring.
    """
    ndim = len(shape)
    width = to_whole_number(width, "width")
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    if not isinstance(dims, Mapping) or not dims:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f'dims must map dims to axes, as {{"y": 0, "x": 1}}, got {dims!r}')
    found: list[tuple[DimKey, int, bool]] = []
    axes: set[int] = set()
    for dim, named in dims.items():
        mesh[dim]  # raises MeshDimError for an unknown dim
        axis = to_whole_number(named, f"dims[{dim!r}]")
        if not -ndim <= axis < ndim or axis % ndim in axes:
            raise ValueError(
                f"dims[{dim!r}] is axis {axis}; expected an axis of the array's {ndim}, each once"
            )
        axes.add(axis % ndim)
        if shape[axis] < 3 * width:
            raise ValueError(
                f"array has {shape[axis]} cells along axis {axis}; expected at least"
                f" {3 * width}: a width of {width} at both ends, and as much between"
            )
        found.append((dim, axis % ndim, _is_ring(periodic, dim)))
    return found


def _is_ring(periodic: bool | Mapping[DimKey, bool], dim: DimKey) -> bool:
    return periodic if isinstance(periodic, bool) else bool(periodic.get(dim, False))
