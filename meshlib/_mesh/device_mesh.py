"""``DeviceMesh``: ranks arranged in named dims, with a process group along each dim.

A mesh is an immutable value, equal on every rank. It may be pickled, shared between threads, and
held by ranks outside of it. A rank's coordinate and groups are looked up in the World on demand.
``mesh["dp"]`` stands for all slices along "dp"; each rank calls on its own slice.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from meshlib._calls.call_queue import CallQueue
from meshlib._calls.members import Members
from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._diagnosis.sampling.sample import Coordinate
from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import current_world, find_world, world_of
from meshlib._job.world import World
from meshlib._mesh.layout import IndexArray, Layout
from meshlib._mesh.names import Compress, DimKey, MeshNames, make_dims
from meshlib._mesh.neighbours import MeshOfNeighbours
from meshlib._mesh.rank_layout import RankLayout, RankNumbering
from meshlib._mesh.spec import (
    DimOptions,
    MeshDimError,
    check_dim_names,
    check_shape,
)
from meshlib._mesh.value import check_product, described_ranks
from meshlib._records import values_of
from transport._checks import to_whole_numbers
from transport._waiting.deadline import Timeout

if TYPE_CHECKING:
    import jax.sharding


class DeviceMesh(MeshOfNeighbours):
    """Ranks in an n-dimensional arrangement; every collective is a method of it.

    ``mesh.all_reduce(x)`` runs over all of this rank's slice, ``mesh["dp"].all_reduce(x)`` along
    one dim. Groups are made at first use, by their members alone. ``with mesh:`` makes the mesh
    the thread's ``current_mesh()``.
    """

    _groups: dict[int, tuple[weakref.ref[World], weakref.ref[ProcessGroup]]]

    def __init__(
        self,
        device_type: str,
        mesh: npt.ArrayLike,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend: str | None = None,
        timeout: Timeout | None = None,
        backend_override: Mapping[DimKey, str] | None = None,
        timeout_override: Mapping[DimKey, Timeout] | None = None,
        compress: Mapping[DimKey, Compress] | None = None,
    ) -> None:
        """Arrange the global ranks in ``mesh``: nested lists or an integer array, at least 1-D.

        Any ranks in any order are valid, each once. The mesh is for arrays on devices of
        ``device_type`` (``"cpu"``, ``"cuda"``). The dims are named by ``mesh_dim_names``. Groups
        are made with ``backend`` and ``timeout`` (seconds, a timedelta or ``"30s"``), or by dim
        (name or number) with ``backend_override`` and ``timeout_override``. The defaults are the
        job's. Large sums and averages between hosts may be compressed by dim, with ``compress``:
        ``"bf16"``, ``"fp8"``, ``"int8"`` or a ``Compression``.

        Raises ValueError for a ragged or empty ``mesh``, for wrong names or options, and for ranks
        that are negative, repeated, not integers or (in a job) beyond the world size.
        """
        ranks = RankLayout.of(mesh)
        names = check_dim_names(mesh_dim_names, ranks.layout.ndim)
        options = DimOptions.checked("mesh", backend, timeout)
        layout = ranks.layout
        dims = make_dims(layout.dims, names, backend_override, timeout_override, compress)
        self._init(device_type, ranks, dims, options)
        world = find_world()
        if world is not None:
            self._check_world(world)

    def _caches(self) -> dict[str, dict[Any, Any]]:
        return {**super()._caches(), "_groups": {}}

    @classmethod
    def from_shape(
        cls,
        device_type: str,
        mesh_shape: Sequence[int],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend: str | None = None,
        timeout: Timeout | None = None,
        backend_override: Mapping[DimKey, str] | None = None,
        timeout_override: Mapping[DimKey, Timeout] | None = None,
        compress: Mapping[DimKey, Compress] | None = None,
    ) -> Self:
        """Return the mesh of shape ``mesh_shape`` over ranks 0 to n-1, in C order; needs no job.

        The ranks take no memory. The mesh is for arrays on devices of ``device_type``
        (``"cpu"``, ``"cuda"``). The dims are named by ``mesh_dim_names``. Groups are made with
        ``backend`` and ``timeout`` (seconds, a timedelta or ``"30s"``), or by dim (name or number)
        with ``backend_override`` and ``timeout_override``. The defaults are the job's. Large sums
        and averages between hosts may be compressed by dim, with ``compress``: ``"bf16"``,
        ``"fp8"``, ``"int8"`` or a ``Compression``. Raises ValueError for sizes below 1, and for
        wrong names or options.
        """
        shape = check_shape(mesh_shape)
        check_product(shape)
        names = check_dim_names(mesh_dim_names, len(shape))
        options = DimOptions.checked("mesh", backend, timeout)
        ranks = RankLayout.row_major(shape)
        layout = ranks.layout
        dims = make_dims(layout.dims, names, backend_override, timeout_override, compress)
        return cls._make(device_type, ranks, dims, options)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: npt.ArrayLike | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> Self:
        """Return the mesh whose dims are existing groups; its calls use these groups.

        One group makes a 1-D mesh of its ranks. A sequence of groups needs ``mesh``, the ranks:
        group i is then dim i. The mesh is for arrays on devices of ``device_type`` (``"cpu"``,
        ``"cuda"``), and ``mesh_dim_names`` names its dims. Raises ValueError when a group's ranks
        differ from this rank's row of ``mesh`` along the dim, TypeError for an object that is not a
        group.
        """
        groups = tuple(group) if isinstance(group, Sequence) else (group,)
        for one in groups:
            if not isinstance(one, ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"group has {one!r}; expected a ProcessGroup or several")
        if mesh is None and not isinstance(group, ProcessGroup):
            raise ValueError("mesh is missing; expected the ranks that the groups are the dims of")
        array = np.asarray(groups[0].ranks if mesh is None else mesh)
        if array.ndim != len(groups):
            raise ValueError(
                f"mesh has {array.ndim} dims; expected one for each group, that is {len(groups)}"
            )
        made = cls(device_type, array, mesh_dim_names=mesh_dim_names)
        rank = current_world().rank
        for i, one in enumerate(groups):
            along = made[i]._ranks.slice_of(rank)
            if along is not None and tuple(along.tolist()) != one.ranks:
                raise ValueError(
                    f"group {i} has the ranks {list(one.ranks)}, but along dim {i} of mesh rank"
                    f" {rank} is with {along.tolist()}"
                )
        dims = tuple(replace(dim, group=one) for dim, one in zip(made._dims, groups, strict=True))
        return made._make(device_type, made._ranks, dims, made._options)

    # ------------------------------------------------------------------ other ranks

    def with_ranks(self, ranks: npt.ArrayLike) -> Self:
        """Return a mesh over other ``ranks``, with the names and options of this mesh's dims.

        ``ranks`` are global ranks, in an integer array (or nested lists) with the mesh's number of
        dims, of any sizes. Flattened names remain, except for those over parts of dims. Raises the
        errors of ``DeviceMesh``, and ValueError for another number of dims.
        """
        layout = RankLayout.of(ranks, "ranks")
        if layout.layout.ndim != self.ndim:
            raise ValueError(
                f"ranks has {layout.layout.ndim} dims; expected {self.ndim}, as {self.described()}"
            )
        return self._moved(layout)

    def without(self, ranks: Sequence[int], dim: DimKey) -> Self:
        """Return the smaller mesh that remains when ``ranks`` are lost.

        Choose a ``dim`` whose coordinates are replicas, such as ``"dp_replicate"``. A coordinate of
        ``dim`` with a lost rank in any slice is removed from every slice. The other dims keep their
        sizes. Surviving ranks of a removed coordinate are outside of the new mesh. Groups without
        lost ranks are reused.

        Args:
            ranks: Global ranks; ranks outside of the mesh are ignored.
            dim: A dim's name or number.

        Returns:
            A new mesh, or this one if none of ``ranks`` is in it.

        Raises:
            MeshDimError: For an unknown ``dim``.
            ValueError: When no coordinate of ``dim`` would remain.
            TypeError: For ranks that are not integers.
        """
        axis = self._position(dim)
        whole = self.slices()
        held = np.isin(whole, to_whole_numbers(ranks, "ranks"))
        others = tuple(i for i in range(whole.ndim) if i != axis + 1)
        stays = ~held.any(axis=others)
        if stays.all():
            return self
        if not stays.any():
            raise ValueError(
                f"without ranks {sorted(set(whole[held].tolist()))} nothing is left of {self}: each"
                f" coordinate of dim {dim!r} has one of them"
            )
        left = whole[:, *[slice(None)] * axis, stays]
        shape = left.shape[1:]
        numbering = RankNumbering.of(left, "mesh")
        return self._moved(RankLayout(numbering, Layout.row_major(shape)))

    def _moved(self, layout: RankLayout) -> Self:
        world = find_world()
        pairs = zip(self._dims, layout.layout.dims, strict=True)
        dims = tuple(replace(known, dim=dim, group=None) for known, dim in pairs)
        names = MeshNames(dims)
        moved = self._derived(layout, dims, names)
        for name in self._names.all():
            flattened = names.find(name) is None and self._flattened(name)
            if flattened:
                positions, options = flattened
                moved[positions].flatten(name, **values_of(options))
        if world is not None:
            moved._check_world(world)
        return moved

    def _flattened(self, name: str) -> tuple[tuple[int, ...], DimOptions] | None:
        try:
            return self._positions_of(name), self._find(name).options
        except MeshDimError:
            return None  # the name is over parts of dims, or over other dims

    def __repr__(self) -> str:
        """Return names, sizes and ranks of this rank's slice, or of the first slice."""
        head = f"DeviceMesh({self.device_type}, {self.described()}"
        world = find_world()
        number = None if world is None else self._ranks.number_of(world.rank)
        shown = described_ranks(self, number or 0)
        if number is None and self.slice_count > 1:
            return f"{head}, one of {self.slice_count} slices, the first with ranks {shown})"
        return f"{head}, ranks {shown})"

    # ------------------------------------------------------------------ this rank

    @property
    def mesh(self) -> IndexArray:
        """The global ranks of this rank's slice, int64, in the mesh's shape (a new array).

        Raises ValueError on a rank outside of the mesh, unless there is only one slice; see
        ``slices``.
        """
        if self._ranks.slices == 1:
            return self._ranks.slice_at(0)
        world = current_world()
        own = self._ranks.slice_of(world.rank)
        if own is None:
            raise self._not_a_member(world)
        return own

    def get_rank(self) -> int:
        """Return the global rank of the caller."""
        return current_world().rank

    def get_coordinate(self) -> list[int] | Any:
        """Return this rank's coordinates in the mesh, None on a rank outside of it."""
        # Any, not None: most programs call it on members only, and unpack the result.
        return self.coordinate_of(current_world().rank)

    def get_local_rank(self, mesh_dim: DimKey | None = None) -> int:
        """Return this rank's coordinate along ``mesh_dim``, which may be omitted in a 1-D mesh.

        Raises MeshDimError (a ValueError) for an unknown dim, ValueError on a rank outside of the
        mesh and for a missing ``mesh_dim``.
        """
        along = self[self._one_dim(mesh_dim)]
        world = current_world()
        found = along.coordinate_of(world.rank)
        if found is None:
            raise self._not_a_member(world)
        return found[0]

    # ------------------------------------------------------------------ groups

    @property
    def _call_queue(self) -> CallQueue:  # pyright: ignore[reportIncompatibleVariableOverride]
        return call_queue_of(self.process_group)

    @property
    def process_group(self) -> ProcessGroup:
        """This rank's group over all dims, in mesh order; made at first use.

        On a rank outside of the mesh, calls on the group return None.
        """
        world = current_world()
        known_world, known = self._groups.get(id(world), (None, None))
        if known_world is not None and known is not None and known_world() is world:
            group = known()
            if group is not None and not call_queue_of(group).state.destroyed:
                return group
        group = self._find_group(world)
        # Several Worlds share a mesh when ranks are threads; drop the groups of ended ones.
        for key, (_, other) in list(self._groups.items()):
            old = other()
            if old is None or call_queue_of(old).state.destroyed:
                self._groups.pop(key, None)
        self._groups[id(world)] = (weakref.ref(world), weakref.ref(group))
        return group

    def _find_group(self, world: World) -> ProcessGroup:
        self._check_world(world)
        desc = "_".join(self.mesh_dim_names or ())
        members = self._ranks.slice_of(world.rank)
        if members is None:
            others = self.slices().ravel().tolist() if self._ranks.slices == 1 else []
            outside = Members("outside", tuple(others), world.rank, world.backends, 0.0, desc)
            return ProcessGroup(world, outside)
        options = self._options
        if self.ndim == 1:
            (dim,) = self._dims
            if dim.group is not None and world_of(dim.group) is world:
                return dim.group
            options = dim.options.over(options)
        return self._names.group(world, members.ravel().tolist(), options, desc)

    def get_group(self, mesh_dim: DimKey | None = None) -> ProcessGroup:
        """Return this rank's group along ``mesh_dim``, which may be omitted in a 1-D mesh.

        The group over all dims is ``process_group``. Raises the errors of ``get_local_rank``.
        """
        group = self[self._one_dim(mesh_dim)].process_group
        if group.rank() < 0:
            raise self._not_a_member(current_world())
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's group along each dim, outermost first.

        Raises ValueError on a rank outside of the mesh.
        """
        return [self.get_group(i) for i in range(self.ndim)]

    def _one_dim(self, mesh_dim: DimKey | None) -> DimKey:
        if mesh_dim is None and self.ndim > 1:
            raise ValueError(
                f"mesh_dim is missing; the mesh has {self.ndim} dims: {self.described()}"
            )
        return 0 if mesh_dim is None else mesh_dim

    def _not_a_member(self, world: World) -> ValueError:
        return ValueError(
            f"rank {world.rank} is not in {self}; only members have coordinates and groups"
        )

    def _check_world(self, world: World) -> None:
        largest = self._ranks.numbering.largest()
        known = world.membership.known
        if largest >= known:
            raise ValueError(
                f"mesh has rank {largest}, but the world size is {known}:"
                f" expected ranks from 0 to {known - 1}"
            )
        show_place(self, world)

    # ------------------------------------------------------------------ remote calls

    def worker(self, *coordinate: int) -> Any:
        """Return the ``rpc.WorkerInfo`` of the rank at ``coordinate``, an index for each dim.

        ``rpc.rpc_sync(mesh["stage"].worker(1), fn)`` calls the rank with coordinate 1 along
        ``stage`` and this rank's coordinates along all other dims. Negative indices count from the
        end.

        Raises RuntimeError before ``rpc.init_rpc``; ValueError for a wrong number of indices and
        on a rank outside of the mesh; IndexError for an index out of range.
        """
        world = current_world()
        self._check_world(world)
        if world.rpc is None:
            raise RuntimeError("RPC is not initialised; call rpc.init_rpc() first")
        if len(coordinate) != self.ndim:
            raise ValueError(
                f"coordinate has {len(coordinate)} indices {coordinate}; expected one for each of"
                f" the {self.ndim} dims of {self.described()}"
            )
        if self.get_coordinate() is None:
            raise self._not_a_member(world)
        for index, size in zip(coordinate, self.shape, strict=True):
            if not -size <= index < size:
                raise IndexError(f"coordinate is {coordinate}, out of the shape {self.shape}")
        return world.rpc.workers[int(self.mesh[coordinate])]

    # ------------------------------------------------------------------ other libraries

    def to_jax(self) -> jax.sharding.Mesh:
        """Return the ``jax.sharding.Mesh`` of the same shape and names, over all processes.

        For programs with ``shard_map`` or sharded arrays, whose communication is JAX's own (on the
        CPU through Gloo). The first call connects the processes with ``jax.distributed``; they find
        each other through the job's store. Every rank of the job must make that call, before any
        other use of JAX's devices. Dims without names are called ``dim_0``, ``dim_1``, …

        Raises ValueError when ranks are threads, or do not have exactly one JAX device each;
        RuntimeError (by JAX) when JAX's devices are already in use; ImportError without JAX.
        """
        from meshlib._mesh.to_jax import to_jax

        names = self.mesh_dim_names or [f"dim_{i}" for i in range(self.ndim)]
        return to_jax(self.mesh, names)

    # ------------------------------------------------------------------ with mesh:

    def __enter__(self) -> Self:
        """Make this mesh the thread's ``current_mesh()`` until the block ends.

        Raises ValueError without a job.
        """
        current_world().entered.meshes.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the thread's ``current_mesh()`` from before the block."""
        world = find_world()
        # The job and its entered meshes may have ended inside the block.
        entered = [] if world is None else world.entered.meshes
        for i in reversed(range(len(entered))):
            if entered[i] is self:
                del entered[i]
                break


def current_mesh() -> DeviceMesh:
    """Return the mesh of the innermost ``with mesh:`` block that this thread is in.

    Raises ValueError outside of all ``with mesh:`` blocks.
    """
    meshes = current_world().entered.meshes
    if not meshes:
        raise ValueError("there is no current mesh; expected to be inside a `with mesh:` block")
    return meshes[-1]


def show_place(mesh: DeviceMesh, world: World) -> None:
    """Publish this rank's coordinates to the job's monitors if ``mesh`` is the job's mesh.

    The job's mesh is the largest one so far that is not a slice.
    """
    if mesh.slice_count != 1:
        return
    before = [one.size for one in world.progress.coordinates]
    if (mesh.size(), mesh.ndim) < (math.prod(before) if before else 0, len(before)):
        return
    place = mesh.coordinate_of(world.rank)
    if place is not None:
        names = mesh.mesh_dim_names or [f"dim_{i}" for i in range(mesh.ndim)]
        sizes = zip(names, place, mesh.shape, strict=True)
        world.progress.coordinates = tuple(Coordinate(*one) for one in sizes)
