"""The part of a mesh that needs no job: its ranks and names, and meshes derived from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from operator import index as to_int
from typing import Any, Self, TypeVar, cast

from meshlib._did_you_mean import did_you_mean
from meshlib._mesh.layout import IndexArray, Layout, join
from meshlib._mesh.names import Compress, DimKey, MeshDim, MeshNames
from meshlib._mesh.rank_layout import RankLayout
from meshlib._mesh.spec import (
    INFER,
    DimOptions,
    MeshDimError,
    check_dim_names,
    check_shape,
    describe_dims,
    infer_sizes,
)
from transport._checks import to_whole_number
from transport._waiting.deadline import Timeout

DEVICE_TYPES = ("cpu", "cuda")
_MEANT = {"gpu": "cuda", "nvidia": "cuda", "host": "cpu"}
MAX_RANKS = 2**31 - 1
SHOWN_RANKS = 16


M = TypeVar("M", bound="MeshValue")
"""The class of the mesh itself. jedi would resolve ``Self`` to the class that has the method."""


class MeshValue:
    """Ranks in named dims, as an immutable value; ``DeviceMesh`` adds groups of a job.

    Equality and hash depend on the ranks' arrangement, the dims' names and the device type. Each
    operation on dims returns a mesh whose slices are over the same ranks.
    """

    _device_type: str
    _ranks: RankLayout
    _dims: tuple[MeshDim, ...]
    _options: DimOptions
    _names: MeshNames
    _slices: dict[tuple[DimKey, ...], Self]

    def _init(
        self,
        device_type: str,
        ranks: RankLayout,
        dims: Sequence[MeshDim],
        options: DimOptions,
        names: MeshNames | None = None,
    ) -> None:
        if check_device_type(device_type) != "cpu" and any(dim.options.compress for dim in dims):
            raise ValueError(
                f"compress is given for a mesh of device_type {device_type!r}; expected 'cpu':"
                " arrays on GPUs travel as they are"
            )
        # Into __dict__, because __setattr__ refuses.
        vars(self).update(
            _device_type=check_device_type(device_type),
            _ranks=ranks,
            _dims=tuple(dims),
            _options=options,
            _names=MeshNames(dims) if names is None else names,
            **self._caches(),
        )

    def _caches(self) -> dict[str, dict[Any, Any]]:
        """Return the empty caches of a new mesh, by attribute; they do not affect equality."""
        return {"_slices": {}}

    @classmethod
    def _make(cls, *arguments: Any) -> Self:
        mesh = cls.__new__(cls)
        mesh._init(*arguments)
        return mesh

    def _derived(self, ranks: RankLayout, dims: Sequence[MeshDim], names: MeshNames | None) -> Self:
        return self._make(self._device_type, ranks, dims, self._options, names)

    # ------------------------------------------------------------------ a value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a mesh is immutable; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MeshValue):
            return NotImplemented
        return self is other or (
            self._device_type == other._device_type
            and self.mesh_dim_names == other.mesh_dim_names
            and self._ranks == other._ranks
        )

    def __hash__(self) -> int:
        return hash((self._device_type, self.mesh_dim_names, self._ranks))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        dims = tuple(replace(dim, group=None) for dim in self._dims)
        return type(self)._make, (self._device_type, self._ranks, dims, self._options, self._names)

    # ------------------------------------------------------------------ queries

    @property
    def device_type(self) -> str:
        """The kind of device whose arrays the mesh is for: ``"cpu"`` or ``"cuda"``."""
        return self._device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The dims' names, outermost first; None for a mesh without names."""
        return tuple(dim.name for dim in self._dims if dim.name is not None) or None

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims' sizes, outermost first."""
        return self._ranks.layout.shape

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self._ranks.layout.ndim

    def size(self, mesh_dim: DimKey | None = None) -> int:
        """Return the number of ranks in a slice, or along ``mesh_dim`` (a name or a number).

        Raises MeshDimError for an unknown dim.
        """
        return self._ranks.layout.size if mesh_dim is None else self._find(mesh_dim).dim.size

    def slices(self) -> IndexArray:
        """Return the ranks of all slices, int64, shape (number of slices, *shape).

        A mesh that was not sliced is one slice; ``mesh["dp"]`` has one for each coordinate of the
        other dims.
        """
        return self._ranks.whole()

    @property
    def slice_count(self) -> int:
        """The number of slices: 1 for a mesh that was not sliced."""
        return self._ranks.slices

    def rank_at(self, place: int, slice_number: int = 0) -> int:
        """Return the rank at ``place`` (0 to ``size()`` - 1, in C order) of a slice.

        Raises ValueError for a ``place`` or ``slice_number`` (0 to ``slice_count`` - 1) out of
        range, TypeError for a value that is not an integer.
        """
        place = to_whole_number(place, "place")
        slice_number = to_whole_number(slice_number, "slice_number")
        if not 0 <= place < self.size():
            raise ValueError(f"place {place} is not there; expected 0 to {self.size() - 1}")
        if not 0 <= slice_number < self.slice_count:
            raise ValueError(
                f"slice {slice_number} is not there; expected 0 to {self.slice_count - 1}"
            )
        return self._ranks.rank_at(slice_number, place)

    def slice_number(self, rank: int) -> int:
        """Return the number of a global ``rank``'s slice; raise ValueError if it is in none.

        Raises TypeError for a value that is not an integer.
        """
        number = self._ranks.number_of(to_whole_number(rank, "rank"))
        if number is None:
            raise ValueError(f"rank {rank} is not in {self}")
        return number

    def coordinate_of(self, rank: int) -> list[int] | None:
        """Return the coordinates of a global ``rank`` in its slice, None if it is in none.

        Raises TypeError for a value that is not an integer.
        """
        found = self._ranks.coordinates(to_whole_number(rank, "rank"))
        return None if found is None else list(found)

    def described(self) -> str:
        """Return the dims as ``dp=2 × tp=2``."""
        return describe_dims([dim.name for dim in self._dims], self.shape)

    # ------------------------------------------------------------------ other meshes of its ranks

    def __getitem__(self: M, mesh_dim: DimKey | Sequence[DimKey]) -> M:
        """Return the mesh of some dims, in the order given.

        ``mesh_dim`` is a dim's name (flattened ones too), its number, or a tuple of these. Raises
        MeshDimError (a ValueError and a KeyError) for an unknown dim, and for dims that overlap,
        such as "dp" and the flattened "dp_tp".
        """
        keys = self._keys(mesh_dim)
        known = self._slices.get(keys)
        if known is None:
            found = [self._find(key) for key in keys]
            known = self._slices[keys] = self._arranged(self._ranks, found)
        return known

    # Without this, a `for` loop would call __getitem__ with 0, 1, 2 ….
    __iter__ = None

    def permute(self: M, *mesh_dims: DimKey) -> M:
        """Return the mesh with all its dims in the order of ``mesh_dims``.

        Raises MeshDimError unless ``mesh_dims`` names each dim once.
        """
        positions = [self._position(key) for key in self._keys(mesh_dims)]
        if sorted(positions) != list(range(self.ndim)):
            raise MeshDimError(
                f"permute got {mesh_dims!r}; expected each dim of {self.described()} once"
            )
        return self._arranged(self._ranks, [self._dims[i] for i in positions])

    def flatten(
        self: M,
        mesh_dim_name: str | None = None,
        *,
        backend: str | None = None,
        timeout: Timeout | None = None,
        compress: Compress | None = None,
    ) -> M:
        """Return the 1-D mesh over all dims of this one, the last dim varying fastest.

        Flatten a slice to flatten some dims, which need not be neighbours: ``mesh["dp",
        "cp"].flatten("dp_cp")``. The default name is the dims' names joined by ``_``. The mesh that
        this one was sliced from then knows the name, as do all its slices: ``mesh["dp_cp"]``,
        ``mesh.get_group("dp_cp")``.

        Groups are made with ``backend`` and ``timeout`` (seconds, a timedelta or ``"30s"``), by
        default the mesh's. With ``compress`` (such as ``"int8"``), large sums and averages between
        hosts are compressed. Raises MeshDimError when ``mesh_dim_name`` already names other ranks,
        ValueError for wrong options and for a name that is not a string.
        """
        name = mesh_dim_name
        if name is None and self.mesh_dim_names is not None:
            name = "_".join(self.mesh_dim_names)
        if name is not None and (not isinstance(name, str) or not name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"mesh_dim_name {name!r} is not a non-empty string")
        options = DimOptions.checked("flatten", backend, timeout, compress)
        if self.ndim == 1:
            # The ranks are equal, so the dim's options are the defaults.
            options = options.over(self._dims[0].options)
        named = MeshDim(join(self._ranks.layout.dims), name, options)
        if name is not None:
            named = self._names.add(name, named)
        return self._arranged(self._ranks, [named])

    def unflatten(
        self: M,
        mesh_dim: DimKey,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
    ) -> M:
        """Return the mesh with ``mesh_dim`` replaced by dims of ``mesh_sizes``, the slowest first.

        One size may be -1. A mesh with names needs ``mesh_dim_names``. The new dims inherit the
        old one's options. Raises ValueError unless the sizes multiply to the dim's size,
        MeshDimError for an unknown dim and for names that already name other ranks.
        """
        position = self._position(mesh_dim)
        whole = self.shape[position]
        sizes = infer_sizes(
            check_shape(mesh_sizes, "mesh_sizes"),
            whole,
            f"mesh_sizes {tuple(mesh_sizes)}",
            f"the size of dim {mesh_dim!r}",
        )
        if self.mesh_dim_names is not None and mesh_dim_names is None:
            raise ValueError(f"mesh_dim_names is missing; expected {len(sizes)} names")
        if self.mesh_dim_names is None and mesh_dim_names is not None:
            raise ValueError(f"mesh_dim_names is {mesh_dim_names!r}, but the mesh has no names")
        names = check_dim_names(mesh_dim_names, len(sizes))
        ranks = self._ranks.split(position, sizes)
        new = [replace(self._dims[position], name=name, group=None) for name in names]
        dims = [*self._dims[:position], *new, *self._dims[position + 1 :]]
        found = [
            known if known.dim == dim else replace(known, dim=dim)
            for known, dim in zip(dims, ranks.layout.dims, strict=True)
        ]
        for named in found if ranks.numbering is self._ranks.numbering else ():
            known = None if named.name is None else self._names.find(named.name)
            if known is not None and known.dim != named.dim:
                raise MeshDimError(
                    f"mesh_dim_names: {named.name!r} names other ranks of this mesh already;"
                    " take a new name"
                )
        return self._arranged(ranks, found)

    split = unflatten
    """Another name for ``unflatten``."""

    @classmethod
    def concatenate(cls: type[M], meshes: Sequence[M]) -> M:
        """Return the mesh with the dims of all ``meshes``, in order; these are slices of one mesh.

        Raises MeshDimError when they are over different ranks, overlap, or share a name; TypeError
        for a value that is not a list of meshes.
        """
        if not isinstance(meshes, Sequence) or not all(isinstance(m, MeshValue) for m in meshes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"meshes is {meshes!r}; expected a list of meshes")
        if not meshes:
            raise MeshDimError("meshes is empty; expected at least one mesh")
        first = meshes[0]
        for i, mesh in enumerate(meshes):
            if mesh._ranks.numbering != first._ranks.numbering:
                raise MeshDimError(
                    f"meshes[{i}] {mesh} and meshes[0] {first} are not slices of one mesh"
                )
            if mesh.device_type != first.device_type:
                raise MeshDimError(
                    f"meshes[{i}] is for {mesh.device_type!r}, meshes[0] for {first.device_type!r}"
                )
        return first._arranged(first._ranks, [dim for mesh in meshes for dim in mesh._dims])

    # ------------------------------------------------------------------ dims by name

    def _arranged(self, ranks: RankLayout, dims: Sequence[MeshDim]) -> Self:
        """Return the mesh of ``dims`` over ``ranks``; raise MeshDimError if they overlap."""
        names = [dim.name for dim in dims if dim.name is not None]
        for name in names:
            if names.count(name) > 1:
                raise MeshDimError(f"dim {name!r} would be there twice")
        # Dims of one rank have no digits that could overlap, so identity detects repeated ones.
        if len({id(dim) for dim in dims}) < len(dims):
            raise MeshDimError("a dim would be there twice")
        if names and len(names) < len(dims):
            raise MeshDimError(f"dims {names} have names, but others that go with them have none")
        try:
            layout = Layout(tuple(dim.dim for dim in dims))
        except ValueError:
            shown = " and ".join(repr(dim.name) for dim in dims)
            raise MeshDimError(f"dims {shown} overlap: one has a part of another's ranks") from None
        same = ranks.numbering is self._ranks.numbering
        return self._derived(ranks.with_layout(layout), dims, self._names if same else None)

    def _keys(self, keys: DimKey | Iterable[DimKey]) -> tuple[DimKey, ...]:
        """Return ``keys`` as a tuple of names and numbers; raise MeshDimError for other values."""
        if isinstance(keys, str):
            return (keys,)
        several = isinstance(keys, (tuple, list))
        result: list[DimKey] = []
        for key in cast("tuple[DimKey, ...]", keys) if several else (keys,):
            try:
                if isinstance(key, bool):
                    raise TypeError
                result.append(key if isinstance(key, str) else to_int(cast(int, key)))
            except TypeError:
                raise MeshDimError(
                    f"{key!r} names no dim; expected names or numbers of {self._known()}"
                ) from None
        if not result:
            raise MeshDimError(f"no dim is named; expected some of {self._known()}")
        return tuple(result)

    def _find(self, key: DimKey) -> MeshDim:
        """Return the dim of this mesh, or the flattened dim inside it, that ``key`` names."""
        (key,) = self._keys(key)
        if isinstance(key, int):
            if -self.ndim <= key < self.ndim:
                return self._dims[key]
            raise MeshDimError(f"dim {key} is not there; expected one of {self._known()}")
        for named in self._dims:
            if named.name == key:
                return named
        named = self._names.find(key)
        if named is None:
            hint = did_you_mean(key, self._names.all())
            raise MeshDimError(f"dim {key!r} is not there; expected one of {self._known()}{hint}")
        if not self._ranks.layout.covers(named.dim):
            raise MeshDimError(
                f"dim {key!r} is not inside this slice ({self.described()});"
                " slice the mesh that has it"
            )
        return named

    def _positions_of(self, mesh_dim: DimKey) -> tuple[int, ...]:
        found, dims = self._find(mesh_dim), self._dims
        own = [i for i, one in enumerate(dims) if one is found]
        if own:
            return (own[0],)
        inside = [i for i, one in enumerate(dims) if Layout((found.dim,)).covers(one.dim)]
        for order in permutations([i for i in inside if dims[i].dim.digits]):
            if join(dims[i].dim for i in order) == found.dim:
                return order
        raise MeshDimError(f"{mesh_dim!r} is made of parts of dims of {self.described()}")

    def _position(self, key: DimKey) -> int:
        """Return the number of one of this mesh's own dims."""
        found = self._find(key)
        for i, named in enumerate(self._dims):
            if named is found:
                return i
        raise MeshDimError(f"{key!r} is a flattened name; expected a dim of {self.described()}")

    def _known(self) -> str:
        covers = self._ranks.layout.covers
        inside = [name for name, named in self._names.all().items() if covers(named.dim)]
        names = dict.fromkeys([*(self.mesh_dim_names or ()), *inside])
        return ", ".join(names) if names else f"0 to {self.ndim - 1}"


def described_ranks(mesh: MeshValue, slice_number: int = 0) -> str:
    """Return the ranks of a slice in C order, as ``[0, 2]`` or ``[0, 1, 2, 3, …, 127]``.

    ``slice_number`` counts the slices of ``mesh`` in the order of their first ranks.
    """
    size = mesh.size()
    places = range(size if size <= SHOWN_RANKS else 4)
    shown = [str(mesh.rank_at(place, slice_number)) for place in places]
    if size > SHOWN_RANKS:
        shown += ["…", str(mesh.rank_at(size - 1, slice_number))]
    return f"[{', '.join(shown)}]"


def positions_of(mesh: MeshValue, mesh_dim: DimKey) -> tuple[int, ...]:
    """Return the positions in ``mesh`` of the dims that ``mesh_dim`` covers, outermost first.

    A dim's name or number has one position, a flattened name several. Raises MeshDimError for an
    unknown dim, and for a name over parts of dims.
    """
    return mesh._positions_of(mesh_dim)  # pyright: ignore[reportPrivateUsage]


def check_device_type(device_type: object) -> str:
    """Return the device type in lower case; raise ValueError for an unknown one."""
    if isinstance(device_type, str) and device_type.lower() in DEVICE_TYPES:
        return device_type.lower()
    hint = (
        " without a number"
        if ":" in str(device_type)
        else did_you_mean(_MEANT.get(str(device_type).lower(), str(device_type)), DEVICE_TYPES)
    )
    raise ValueError(
        f"device_type is {device_type!r}; expected one of {', '.join(DEVICE_TYPES)}{hint}"
    )


def check_product(shape: Sequence[int]) -> int:
    """Return the number of ranks of ``shape``; raise ValueError for too many, and for a -1."""
    if INFER in shape:
        raise ValueError(f"mesh_shape {tuple(shape)} has -1, which only a job's world size settles")
    count = math.prod(shape)
    if count > MAX_RANKS:
        raise ValueError(f"mesh_shape {tuple(shape)} has {count} ranks, more than {MAX_RANKS}")
    return count


def mesh_key(mesh: MeshValue) -> tuple[object, ...]:
    """Return a tuple that equals another mesh's if the meshes are equal.

    Tuples are compared and hashed without running Python code, which ``jax.jit`` requires of the
    static fields of a pytree's nodes if ranks are threads. It takes 8 bytes for each rank.
    """
    ranks = mesh._ranks  # pyright: ignore[reportPrivateUsage]
    return (mesh.device_type, mesh.mesh_dim_names, *ranks.key())
