"""The ``[mesh]`` table of training configs; docs/program/mesh.md has the schema.

A config is checked when it is read, and its world size as soon as that is known: both before a
process or a connection starts. The launcher reads the config once for all ranks, so reading must
not import an array library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshlib._did_you_mean import did_you_mean
from meshlib._mesh.read_config import SUFFIXES, read_config
from meshlib._mesh.spec import (
    CONVENTIONAL_NAMES,
    INFER,
    DimOptions,
    check_degree,
    check_name,
    check_one_inferred,
    describe_dims,
    infer_sizes,
    integer,
    parse_mesh,
)
from meshlib._records import values_of

if TYPE_CHECKING:
    import os

    from meshlib._mesh.device_mesh import DeviceMesh

KEYS = ("dims", "backend", "timeout", "flatten", "options")
"""Keys of the ``[mesh]`` table that are not dims."""

# An integer under any name is a dim, so a misspelt name would pass unnoticed. A name this similar
# to a known one is an error, unless it is listed in `dims`.
_SLIP = 0.87
_LONG_NAMES = tuple(name for name in (*CONVENTIONAL_NAMES, *KEYS) if len(name) > 4)


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """A mesh: ordered dims (outermost first), flattened names, options. Immutable, by value.

    Made by ``load``, ``from_dict`` or ``from_string``, which check everything. ``dims`` holds
    (name, degree) pairs; one degree may be -1. ``flattened`` holds (name, names of dims) pairs.
    ``options`` apply to the whole mesh, ``overrides`` to one dim or flattened name. Errors name the
    mesh by ``source``.
    """

    dims: tuple[tuple[str, int], ...]
    flattened: tuple[tuple[str, tuple[str, ...]], ...] = ()
    options: DimOptions = field(default_factory=DimOptions)
    overrides: tuple[tuple[str, DimOptions], ...] = ()
    source: str = field(default="mesh", compare=False)

    # ------------------------------------------------------------------ constructors

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeshConfig:
        """Return the mesh in the ``mesh`` table of the TOML, JSON or YAML file at ``path``.

        The suffix names the format. The file may have other tables (``[train]`` and so on). Raises
        ValueError, which names the file, for a wrong entry; OSError for an unreadable file;
        ImportError for YAML without PyYAML.
        """
        config = read_config(Path(path))
        if "mesh" not in config:
            hint = did_you_mean("mesh", map(str, config))
            found = ", ".join(map(str, config)) or "nothing"
            meant = hint.replace("did you mean", "is the mesh in")
            raise ValueError(f"{path}: there is no [mesh] table, only: {found}{meant}")
        return cls._from_value(config["mesh"], f"{path}: [mesh]")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MeshConfig:
        """Return the mesh of a parsed config, or of its ``mesh`` table alone.

        Raises ValueError, which names the wrong entry.
        """
        inner = _table(config, "config").get("mesh")
        if isinstance(inner, (str, Mapping)):
            return cls._from_value(inner, "mesh")
        return cls._from_value(config, "mesh")

    @classmethod
    def from_string(cls, text: str) -> MeshConfig:
        """Return the mesh of a ``meshrun --mesh`` string: ``"dp=2,tp=2"``.

        Raises ValueError for another format of ``text``, TypeError for a value that is not a
        string.
        """
        return cls(tuple(parse_mesh(text).items()))

    @classmethod
    def parse(cls, text: str) -> MeshConfig:
        """Return the mesh in the file named ``text`` if it has a config suffix, else in ``text``.

        Such a text is ``"dp=2,tp=2"`` or a result of ``to_text``. Raises the errors of ``load``,
        ``from_dict`` and ``from_string``.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"text is {text!r}; expected the name of a file, or 'dp=2,tp=2'")
        if text.startswith("{"):
            table = _table(json.loads(text), "mesh")
            return cls._from_value(table.get("mesh"), str(table.get("source", "mesh")))
        return cls.load(text) if text.lower().endswith(SUFFIXES) else cls.from_string(text)

    @classmethod
    def _from_value(cls, value: object, where: str) -> MeshConfig:
        if isinstance(value, str):
            return replace(cls.from_string(value), source=where)
        table = _table(value, where)
        dims = _dims(table, where)
        flattened = _flattened(table.get("flatten", {}), dims, where)
        options = _options(
            {key: table[key] for key in ("backend", "timeout") if key in table}, where
        )
        overrides = _overrides(table.get("options", {}), [*dims, *flattened], where)
        return cls(
            tuple(dims.items()), tuple(flattened.items()), options, tuple(overrides.items()), where
        )

    def to_text(self) -> str:
        """Return a line that ``parse`` reads as an equal config: ``dp=2,tp=2``, or JSON.

        The launcher passes this line to the ranks, so that an edited file cannot make them differ.
        """
        dims = ",".join(f"{name}={degree}" for name, degree in self.dims)
        if replace(self, dims=()) == MeshConfig(()):  # only dims
            named = {"source": self.source, "mesh": dims}
            return dims if self.source == "mesh" else json.dumps(named)
        table: dict[str, object] = {"dims": self.names, **dict(self.dims)}
        table |= {"flatten": dict(self.flattened), **_given(self.options)}
        table["options"] = {name: _given(options) for name, options in self.overrides}
        return json.dumps({"source": self.source, "mesh": table})

    # ------------------------------------------------------------------ queries

    @property
    def names(self) -> tuple[str, ...]:
        """The dims' names, outermost first."""
        return tuple(name for name, _ in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims' degrees, outermost first; -1 for one that is not inferred yet."""
        return tuple(degree for _, degree in self.dims)

    @property
    def world_size(self) -> int | None:
        """The number of ranks that the mesh needs, None while a degree is -1."""
        return None if INFER in self.shape else math.prod(self.shape)

    def options_for(self, name: str) -> DimOptions:
        """Return the options of a dim or flattened ``name``: its own, else the mesh's.

        Raises ValueError for an unknown name.
        """
        known = [*self.names, *dict(self.flattened)]
        if name not in known:
            raise ValueError(
                f"{self.source}: {name!r} is neither a dim nor a flattened name; expected one of"
                f" {', '.join(known)}{did_you_mean(str(name), known)}"
            )
        return dict(self.overrides).get(name, DimOptions()).over(self.options)

    def __str__(self) -> str:
        return describe_dims(self.names, self.shape)

    # ------------------------------------------------------------------ meshes

    def resolve(self, world_size: int) -> MeshConfig:
        """Return the config with -1 inferred, so that the degrees multiply to ``world_size``.

        Raises ValueError, which names both numbers, when that is impossible.
        """
        size = integer(world_size)
        if size is None or size < 1:
            raise ValueError(f"world_size is {world_size!r}; expected an integer >= 1")
        shape = infer_sizes(self.shape, size, f"{self.source} {self}")
        return replace(self, dims=tuple(zip(self.names, shape, strict=True)))

    def mesh_for(self, world_size: int, device_type: str = "cpu") -> DeviceMesh:
        """Return the mesh over ranks 0 to ``world_size`` - 1, without any process group.

        ``device_type`` is ``"cpu"`` or ``"cuda"``. Raises ValueError when the degrees do not fit.
        """
        from meshlib._mesh.device_mesh import DeviceMesh  # imports NumPy

        resolved = self.resolve(world_size)
        own = [(name, options) for name, options in self.overrides if name in self.names]
        mesh = DeviceMesh.from_shape(
            device_type,
            resolved.shape,
            mesh_dim_names=resolved.names,
            backend=self.options.backend,
            timeout=self.options.timeout,
            backend_override={n: o.backend for n, o in own if o.backend is not None},
            timeout_override={n: o.timeout for n, o in own if o.timeout is not None},
            compress={n: o.compress for n, o in own if o.compress is not None},
        )
        for name, parts in self.flattened:
            mesh[parts].flatten(name, **values_of(self.options_for(name)))
        return mesh

    def build(self, device_type: str = "cpu") -> DeviceMesh:
        """Return the mesh over all ranks of this job, for arrays on ``device_type``.

        Initialises the default process group from the environment if necessary. Every rank must
        call it. Raises ValueError when the degrees do not fit the job's world size.
        """
        import numpy as np

        from meshlib._job.starting.init import ensure_world

        ranks = ensure_world().membership.whole
        mesh = self.mesh_for(len(ranks), device_type)
        whole = ranks == range(len(ranks))
        return mesh if whole else mesh.with_ranks(np.reshape(ranks, mesh.shape))


# ---------------------------------------------------------------------- the parts of the table


def _dims(table: Mapping[str, object], where: str) -> dict[str, int]:
    entries = {key: value for key, value in table.items() if key not in KEYS}
    order = _names_in(table["dims"], f"{where}: dims") if "dims" in table else None
    dims: dict[str, int] = {}
    for key, value in entries.items():
        check_name(key, where)
        listed = order is not None and key in order
        if not listed and integer(value) is None:
            # Not a degree, so most likely not meant as a dim.
            known = (*KEYS, *CONVENTIONAL_NAMES)
            hint = "" if key in known else did_you_mean(key, known)
            raise ValueError(
                f"{where}: {key!r} is {value!r}; expected the degree of a dim"
                f" (an integer >= 1, or -1) or one of {', '.join(KEYS)}{hint}"
            )
        dims[key] = check_degree(key, value, where)
        if not listed:
            _check_spelling(key, where)
            if order is not None:
                hint = did_you_mean(key, order)
                raise ValueError(f"{where}: {key!r} is not in dims {order}{hint}")
    if not entries:
        raise ValueError(f"{where}: there is no dim; expected at least one, such as dp = 2")
    if order is not None:
        missing = [name for name in order if name not in dims]
        if missing:
            hint = did_you_mean(missing[0], dims)
            raise ValueError(f"{where}: dims names {missing[0]!r}, which has no degree{hint}")
        dims = {name: dims[name] for name in order}
    check_one_inferred(dims.values(), where)
    return dims


def _check_spelling(name: str, where: str) -> None:
    if name in CONVENTIONAL_NAMES:
        return
    folded = {known.casefold(): known for known in CONVENTIONAL_NAMES}
    meant = folded.get(name.casefold())
    hint = f"; did you mean {meant!r}?" if meant else ""
    numbered = name.rstrip("0123456789_") in CONVENTIONAL_NAMES
    hint = hint or ("" if numbered else did_you_mean(name, _LONG_NAMES, _SLIP))
    if hint:
        raise ValueError(
            f"{where}: {name!r} is not a known key{hint}"
            f" (if it is a dim, list all names in dims = [...])"
        )


def _flattened(value: object, dims: Mapping[str, int], where: str) -> dict[str, tuple[str, ...]]:
    where = f"{where}: flatten"
    result: dict[str, tuple[str, ...]] = {}
    for name, parts in _table(value, where).items():
        check_name(name, where)
        if name in dims:
            raise ValueError(f"{where}: {name!r} is a dim already; expected a new name")
        found = _names_in(parts, f"{where}: {name}")
        for part in found:
            if part not in dims:
                raise ValueError(
                    f"{where}: {name} has {part!r}, which is not a dim; expected some of"
                    f" {', '.join(dims)}{did_you_mean(part, dims)}"
                )
        result[name] = found
    return result


def _overrides(value: object, names: list[str], where: str) -> dict[str, DimOptions]:
    where = f"{where}: options"
    result: dict[str, DimOptions] = {}
    for name, options in _table(value, where).items():
        if name not in names:
            near = did_you_mean(str(name), names)
            if name in ("backend", "timeout"):  # a mesh has no compress option
                near = "; what holds for the whole mesh stands in [mesh] itself"
            raise ValueError(
                f"{where}: {name!r} is neither a dim nor a flattened name; expected some of"
                f" {', '.join(names)}{near}"
            )
        result[name] = _options(_table(options, f"{where}: {name}"), f"{where}: {name}")
    return result


def _options(table: Mapping[str, object], where: str) -> DimOptions:
    known = tuple(field.name for field in fields(DimOptions))
    for key in table:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ValueError(f"{where}: {key!r} is unknown; expected {', '.join(known)}{hint}")
    return DimOptions.checked(where, **table)


def _given(options: DimOptions) -> dict[str, object]:
    compress = options.compress and options.compress.to_value()
    given = values_of(options) | {"compress": compress}
    return {key: value for key, value in given.items() if value is not None}


def _names_in(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"{where} is {value!r}; expected a list of dims' names")
    names = tuple(check_name(name, where) for name in cast(list[object], value))
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{where} names {twice[0]!r} twice")
    return names


def _table(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r}; expected a table of keys and values")
    return cast(Mapping[str, object], value)
