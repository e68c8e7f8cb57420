"""The distribution of a global array over a mesh: the arithmetic of ``Sharding``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Self

from meshlib._mesh.device_mesh import DeviceMesh
from meshlib._mesh.names import DimKey
from meshlib._mesh.spec import MeshDimError
from meshlib._mesh.value import positions_of
from meshlib.sharding._blocks import block, blocks
from meshlib.sharding._local import shape_of
from meshlib.sharding._spec import (
    Entry,
    P,
    Partial,
    Placement,
    Replicate,
    Shard,
    read_spec,
    reduction_name,
)
from transport._checks import to_whole_numbers

PartialDims = Mapping[DimKey, Any] | Sequence[DimKey] | DimKey | None
LINEAR = frozenset({"sum", "avg"})
"""The linear ops. Partial values of several linear ops may be reduced in any order. Sums and
multiples of partial values are partial values of the result.
"""


@dataclass(slots=True, init=False, repr=False)
class ShardingValue:
    """The base of ``Sharding``: its fields and arithmetic, without redistribution plans."""

    dims: tuple[tuple[int, ...], ...]
    """The mesh dims that split each array dim, by number; trailing unsplit dims are left out."""
    partial_dims: tuple[tuple[int, str], ...]
    """The partial mesh dims, by number, with their ops."""
    mesh: DeviceMesh
    """The mesh."""
    _hash: int = field(compare=False)  # stored, because hashing the mesh is slow

    def __init__(self, mesh: DeviceMesh, spec: Any = None, partial: PartialDims = None) -> None:
        if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"mesh is {mesh!r}; expected a DeviceMesh")
        entries, pending = read_spec(spec, mesh.ndim)
        pending.update(_read_partial(partial))
        dims = [_positions(mesh, entry) for entry in entries]
        ops = [(i, op) for key, op in pending.items() for i in _positions(mesh, key)]
        named = [i for dim in dims for i in dim] + [i for i, _ in ops]
        for i in named:
            if named.count(i) > 1:
                raise ValueError(
                    f"spec {entries} with partial {pending} names mesh dim {dim_key(mesh, i)!r} of"
                    f" {mesh.described()} twice; expected each at most once"
                )
        self._set(mesh, dims, ops)

    def _set(
        self, mesh: DeviceMesh, dims: Sequence[Sequence[int]], ops: Sequence[tuple[int, str]]
    ) -> None:
        kinds = {op for _, op in ops}
        if len(kinds) > 1 and not kinds <= LINEAR:
            raise ValueError(
                f"partial has the ops {', '.join(sorted(kinds))}, whose result depends on the order"
                " of the reductions; expected a single op, or sum and avg"
            )
        kept = [tuple(dim) for dim in dims]
        while kept and not kept[-1]:
            kept.pop()
        # Bypasses __setattr__, which always raises.
        put = object.__setattr__
        put(self, "mesh", mesh)
        put(self, "dims", tuple(kept))
        put(self, "partial_dims", tuple(sorted(ops)))
        put(self, "_hash", hash((mesh, self.dims, self.partial_dims)))

    @classmethod
    def of_positions(
        cls,
        mesh: DeviceMesh,
        dims: Sequence[Sequence[int]],
        partial: Sequence[tuple[int, str]] = (),
    ) -> Self:
        """Return the sharding with ``dims`` and ``partial_dims`` as given: mesh dims by number.

        For code that computes with shardings: it skips some of the checks of ``Sharding``.
        """
        sharding = cls.__new__(cls)
        sharding._set(mesh, dims, partial)
        return sharding

    # ------------------------------------------------------------------ a value

    # Written by hand: a frozen dataclass with slots raises an unhelpful error for a name without a
    # field.
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Sharding is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Sharding is immutable; {name!r} cannot be deleted")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return self.of_positions, (self.mesh, self.dims, self.partial_dims)

    def __repr__(self) -> str:
        return f"Sharding({self.mesh.described()}: {self.described()})"

    def described(self) -> str:
        """Return spec and partial dims: ``P('dp')`` or ``P('dp'), partial {'tp': 'sum'}``."""
        return f"{self.spec}, partial {self.partial}" if self.partial_dims else repr(self.spec)

    # ------------------------------------------------------------------ as users write it

    @property
    def spec(self) -> P:
        """The mesh dims that split each array dim, by name (by number in a mesh without names)."""
        return P(*([dim_key(self.mesh, i) for i in dim] for dim in self.dims))

    @property
    def partial(self) -> dict[DimKey, str]:
        """The ops of the mesh dims along which values are partial, by name or number."""
        return {dim_key(self.mesh, i): op for i, op in self.partial_dims}

    @property
    def placements(self) -> list[Placement]:
        """This sharding in torch's form: a placement for each mesh dim, the outermost first.

        Raises ValueError for an array dim that is split by an inner mesh dim before an outer one:
        torch's list cannot express that.
        """
        result: list[Placement] = [Replicate()] * self.mesh.ndim
        for array_dim, dim in enumerate(self.dims):
            if list(dim) != sorted(dim):
                raise ValueError(
                    f"{self} splits dim {array_dim} by mesh dims in another order than the mesh's,"
                    " which a list of placements cannot express; use spec"
                )
            for i in dim:
                result[i] = Shard(array_dim)
        for i, op in self.partial_dims:
            result[i] = Partial(op)
        return result

    @property
    def replicated_dims(self) -> tuple[int, ...]:
        """The mesh dims, by number, along which all ranks have the same values."""
        used = {i for dim in self.dims for i in dim} | {i for i, _ in self.partial_dims}
        return tuple(i for i in range(self.mesh.ndim) if i not in used)

    @property
    def is_replicated(self) -> bool:
        """True if each rank has the whole array: nothing is split or partial."""
        return not self.dims and not self.partial_dims

    def split_of(self, array_dim: int) -> tuple[int, ...]:
        """Return the mesh dims, by number, that split ``array_dim`` (from 0)."""
        return self.dims[array_dim] if array_dim < len(self.dims) else ()

    # ------------------------------------------------------------------ the parts of ranks

    def local_shape(self, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of a rank's part (default: this rank's) of an array of ``shape``.

        Raises the errors of ``slices``.
        """
        return shape_of(self.slices(shape, rank))

    def slices(self, shape: Sequence[int], rank: int | None = None) -> tuple[slice, ...]:
        """Return the part of a global array of ``shape`` on a global ``rank``: a slice per dim.

        ``array[sharding.slices(array.shape, rank)]`` is that rank's part; partial values in it
        still have to be reduced. ``rank`` is this rank by default. Raises ValueError for a rank
        that is not in the mesh and for a shape with fewer dims than the spec.
        """
        return self.slices_at(self.check_shape(shape), self._coordinate_of(rank))

    def _coordinate_of(self, rank: int | None) -> list[int]:
        rank = self.mesh.get_rank() if rank is None else rank
        coordinate = self.mesh.coordinate_of(rank)
        if coordinate is None:
            raise ValueError(f"rank {rank} is not in {self.mesh}, so it has no part of the array")
        return coordinate

    def slices_at(self, shape: Sequence[int], coordinate: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of the rank at ``coordinate`` in the mesh; checks nothing."""
        sizes, dims = self.mesh.shape, self.dims
        return tuple(
            slice(*block(n, [sizes[i] for i in dims[d]], [coordinate[i] for i in dims[d]]))
            if d < len(dims) and dims[d]
            else slice(0, n)
            for d, n in enumerate(shape)
        )

    @property
    def replica_count(self) -> int:
        """The number of ranks that have the same part with the same values."""
        return math.prod(self.mesh.shape[i] for i in self.replicated_dims)

    def replica(self, rank: int | None = None) -> int:
        """Return the number of ``rank`` among the ranks with its part: 0 to ``replica_count`` - 1.

        Exactly one rank of each part has number 0. Let that rank do work that must be done once,
        such as writing the part. Raises ValueError for a rank that is not in the mesh.
        """
        coordinate = self._coordinate_of(rank)
        number = 0
        for i in self.replicated_dims:
            number = number * self.mesh.shape[i] + coordinate[i]
        return number

    def parts(self, shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """Yield each non-empty part once, in C order; together the parts are the whole array."""
        lengths = self.check_shape(shape)
        along: list[list[slice]] = []
        for d, n in enumerate(lengths):
            starts, stops = blocks(n, [self.mesh.shape[i] for i in self.split_of(d)])
            pairs = zip(starts.ravel().tolist(), stops.ravel().tolist(), strict=True)
            along.append([slice(a, b) for a, b in pairs if a < b])
        yield from product(*along)

    def check_shape(self, shape: Sequence[int]) -> list[int]:
        """Return ``shape`` as ints; raise ValueError when it has fewer dims than the spec."""
        lengths = to_whole_numbers(shape, "shape")
        if len(lengths) < len(self.dims):
            raise ValueError(
                f"shape {tuple(lengths)} has {len(lengths)} dims, but {self} splits dim"
                f" {len(self.dims) - 1}"
            )
        if min(lengths, default=0) < 0:
            raise ValueError(f"shape {tuple(lengths)}: expected lengths of at least 0")
        return lengths

    # ------------------------------------------------------------------ others

    def with_spec(self, spec: Any = None, partial: PartialDims = None) -> Self:
        """Return another sharding on the same mesh."""
        return spec if isinstance(spec, type(self)) else type(self)(self.mesh, spec, partial)

    def reduced(self) -> Self:
        """Return this sharding with partial values reduced, and replicated over their mesh dims."""
        return self.of_positions(self.mesh, self.dims) if self.partial_dims else self


def dim_key(mesh: DeviceMesh, position: int) -> DimKey:
    """Return the name of a mesh dim, or its number if the mesh has no names."""
    names = mesh.mesh_dim_names
    return position if names is None else names[position]


def _positions(mesh: DeviceMesh, entry: Entry) -> list[int]:
    if entry is None:
        return []
    keys = entry if isinstance(entry, tuple) else (entry,)
    try:
        return [i for key in keys for i in positions_of(mesh, key)]
    except MeshDimError as error:
        raise MeshDimError(f"spec: {error}") from None


def _read_partial(partial: PartialDims) -> dict[DimKey, str]:
    if partial is None:
        return {}
    if isinstance(partial, Mapping):
        return {key: reduction_name(op) for key, op in partial.items()}
    keys = (partial,) if isinstance(partial, (str, int)) else partial
    return dict.fromkeys(keys, "sum")
