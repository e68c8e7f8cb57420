"""The names, options and groups of a mesh's dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from meshlib._collectives.group_of_ranks import call_queue_of
from meshlib._did_you_mean import did_you_mean
from meshlib._mesh.layout import Dim
from meshlib._mesh.spec import (
    DimOptions,
    MeshDimError,
    check_backend,
    check_compress,
    check_timeout,
    integer,
)
from transport._operands.compression import Compression
from transport._waiting.deadline import Timeout

if TYPE_CHECKING:
    from meshlib._groups.process_group import ProcessGroup
    from meshlib._job.world import World

DimKey = str | int
"""A dim's name (also a flattened one) or its number; negative numbers count from the last."""

Compress = str | Mapping[str, Any] | Compression
"""The format of large reductions: ``"bf16"``, ``"fp8"``, ``"int8"``, or with options."""

GroupKey = tuple[tuple[int, ...], DimOptions]
"""The ranks and options of a group."""


@dataclass(frozen=True, slots=True)
class MeshDim:
    """A dim of a mesh: its part of the rank numbering, its name, and the options of its groups.

    ``group`` is the group passed to ``from_group``, else None.
    """

    dim: Dim
    name: str | None
    options: DimOptions
    group: ProcessGroup | None = None


class MeshNames:
    """The append-only names and groups that a mesh shares with all meshes made from it.

    Both a slice and its original mesh hold this object, so a name added by ``flatten`` is known to
    both. A name never changes its meaning, so threads may share the object. It is not part of a
    mesh's value: equal meshes may know different names.

    Groups are cached here too: after a failure, all these meshes keep the broken group, and an
    equal mesh that is made anew gets another.
    """

    def __init__(self, dims: Iterable[MeshDim]) -> None:
        self._known = {dim.name: dim for dim in dims if dim.name is not None}
        # Several Worlds share a mesh when ranks are threads. Each World holds its own groups.
        self._groups: WeakKeyDictionary[World, dict[GroupKey, ref[ProcessGroup]]] = (
            WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type[MeshNames], tuple[list[MeshDim]]]:
        return MeshNames, ([replace(dim, group=None) for dim in self._known.copy().values()],)

    def add(self, name: str, named: MeshDim) -> MeshDim:
        """Return the dim called ``name``, after adding ``named`` if the name is new.

        Raises MeshDimError when the name already means other ranks, or has other options.
        """
        # setdefault is atomic: two threads that add one name both see the first meaning.
        known = self._known.setdefault(name, named)
        if known.dim != named.dim:
            raise MeshDimError(f"{name!r} names other ranks of this mesh already; take a new name")
        if named.options not in (DimOptions(), known.options):
            raise MeshDimError(
                f"{name!r} has {known.options} already, not {named.options}; take a new name"
            )
        return known

    def group(
        self, world: World, ranks: Sequence[int], options: DimOptions, desc: str
    ) -> ProcessGroup:
        """Return the group of ``ranks`` in ``world``: the cached one unless it was destroyed."""
        found = self._groups.setdefault(world, {})
        key = (tuple(ranks), options)
        known = found[key]() if key in found else None
        if known is not None and not call_queue_of(known).state.destroyed:
            return known
        group = world.registry.group_for(
            ranks,
            backend=options.backend,
            timeout=options.timeout,
            desc=desc,
            compression=options.compress,
        )
        found[key] = ref(group)
        return group

    def find(self, name: str) -> MeshDim | None:
        """Return the dim called ``name``, or None if it is unknown."""
        return self._known.get(name)

    def all(self) -> dict[str, MeshDim]:
        """Return all dims by name, in the order of their definition."""
        return self._known.copy()


def make_dims(
    dims: Sequence[Dim],
    names: Sequence[str | None],
    backend_override: Mapping[DimKey, str] | None,
    timeout_override: Mapping[DimKey, Timeout] | None,
    compress: Mapping[DimKey, Compress] | None,
) -> tuple[MeshDim, ...]:
    """Return the dims of a new mesh; raise MeshDimError for an override of an unknown dim.

    Raises ValueError for overrides that are not a dict, and for wrong options in them.
    """
    compressed = _by_position(names, compress, "compress")
    backends = _by_position(names, backend_override, "backend_override")
    timeouts = _by_position(names, timeout_override, "timeout_override")
    return tuple(
        MeshDim(
            dim,
            name,
            DimOptions(
                check_backend(backends.get(i), "backend_override"),
                check_timeout(timeouts.get(i), "timeout_override"),
                check_compress(compressed.get(i), "compress"),
            ),
        )
        for i, (dim, name) in enumerate(zip(dims, names, strict=True))
    )


def _by_position(
    names: Sequence[str | None], override: Mapping[DimKey, object] | None, argument: str
) -> dict[int, object]:
    found: dict[int, object] = {}
    if override is not None and not isinstance(override, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{argument} is {override!r}; expected a dict by dims' names or numbers")
    for key, value in (override or {}).items():
        number = integer(key)
        if isinstance(key, str):
            position = names.index(key) if key in names else None
        elif number is not None and -len(names) <= number < len(names):
            position = number % len(names)
        else:
            position = None
        if position is None:
            known = [name for name in names if name is not None]
            raise MeshDimError(
                f"{argument} has {key!r}; expected dims' names ({', '.join(known) or 'none'})"
                f" or numbers below {len(names)}{did_you_mean(str(key), known)}"
            )
        if position in found:
            raise MeshDimError(f"{argument} names dim {position} ({names[position]}) twice")
        found[position] = value
    return found
