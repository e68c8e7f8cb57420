"""Checks of the names, degrees and options of mesh dims that users write.

Shared by ``init_device_mesh``, ``MeshConfig`` and ``meshrun --mesh``; imports no array library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import index as to_int
from typing import SupportsIndex, cast

from meshlib._did_you_mean import did_you_mean
from transport._operands.compression import Compression
from transport._waiting.deadline import read_duration

CONVENTIONAL_NAMES = ("pp", "dp_replicate", "dp_shard", "dp", "cp", "tp", "ep")
"""Pipeline, replicated / sharded / plain data, context, tensor and expert parallel."""

INFER = -1
"""The degree to infer from the world size."""

_EXAMPLE = "expected NAME=DEGREE pairs such as 'dp=2,tp=2'"
_INTEGER = re.compile(r"-?[0-9]+")


class MeshDimError(ValueError, KeyError):
    """An unknown dim of a mesh, or a dim that cannot be used in this way.

    Also a KeyError, because c10d raises KeyError for ``mesh["unknown"]``.
    """

    def __str__(self) -> str:
        return ValueError.__str__(self)


@dataclass(frozen=True, slots=True)
class DimOptions:
    """Options of the group of a dim; None inherits from the mesh, the group or the job.

    ``backend`` is a registered backend's name, or c10d's ``cpu:tcp,cuda:nccl``; ``timeout`` is the
    deadline of a call, in seconds; ``compress`` is the format of large reductions between hosts.
    """

    backend: str | None = None
    timeout: float | None = None
    compress: Compression | None = None

    @classmethod
    def checked(
        cls, where: str, backend: object = None, timeout: object = None, compress: object = None
    ) -> DimOptions:
        """Return the checked options; raise ValueError, which names ``where``, for a wrong one."""
        return cls(
            check_backend(backend, where),
            check_timeout(timeout, where),
            check_compress(compress, where),
        )

    def over(self, default: DimOptions) -> DimOptions:
        """Return these options, with those of ``default`` in place of None."""
        return DimOptions(
            default.backend if self.backend is None else self.backend,
            default.timeout if self.timeout is None else self.timeout,
            default.compress if self.compress is None else self.compress,
        )


def parse_mesh(text: str) -> dict[str, int]:
    """Return the degrees by dim in a text such as ``"dp=2,tp=2"``, outermost first; -1 stays -1.

    Raises ValueError for anything but NAME=DEGREE pairs with distinct names and legal degrees,
    TypeError for a value that is not a string.
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"the mesh is {text!r}; {_EXAMPLE}")
    dims: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not _INTEGER.fullmatch(value):
            raise ValueError(f"mesh {text!r}: {part.strip()!r} is not a dim; {_EXAMPLE}")
        check_name(name, f"mesh {text!r}")
        if name in dims:
            raise ValueError(f"mesh {text!r} names {name!r} twice; {_EXAMPLE}")
        dims[name] = check_degree(name, int(value), f"mesh {text!r}")
    check_one_inferred(dims.values(), f"mesh {text!r}")
    return dims


def check_name(name: object, where: str) -> str:
    """Return ``name``; raise ValueError unless it is an identifier."""
    if not isinstance(name, str) or not name.isidentifier():
        hint = did_you_mean(str(name).replace("-", "_"), CONVENTIONAL_NAMES)
        raise ValueError(f"{where}: dim name {name!r} is not an identifier{hint}")
    return name


def integer(value: object) -> int | None:
    """Return an integer (NumPy's too) as an int; None for a bool and anything else."""
    if isinstance(value, bool):
        return None
    try:
        return to_int(cast(SupportsIndex, value))
    except TypeError:
        return None


def check_degree(name: str, degree: object, where: str) -> int:
    """Return ``degree``; raise ValueError unless it is an integer that is at least 1, or -1."""
    number = integer(degree)
    if number is None or (number < 1 and number != INFER):
        raise ValueError(
            f"{where}: the degree of {name!r} is {degree!r};"
            " expected an integer >= 1, or -1 to have it inferred"
        )
    return number


def check_one_inferred(degrees: Iterable[int], where: str) -> None:
    """Raise ValueError when more than one degree is -1."""
    count = sum(degree == INFER for degree in degrees)
    if count > 1:
        raise ValueError(f"{where}: {count} degrees are -1; at most one can be inferred")


def check_timeout(timeout: object, where: str) -> float | None:
    """Return ``timeout`` in seconds, None for None.

    It may be a number of seconds, a timedelta, or a string such as ``"30s"`` (ms, s, m, h). Raises
    ValueError for anything else, and unless it is finite and positive.
    """
    seconds = math.nan
    if timeout is None:
        return None
    if isinstance(timeout, str):
        seconds = read_duration(timeout) or math.nan
    elif isinstance(timeout, (int, float, timedelta)) and not isinstance(timeout, bool):
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{where}: timeout {timeout!r}; expected a number of seconds > 0,"
            " a timedelta or a string such as '30s', '10m' or '500ms'"
        )
    return seconds


def check_compress(compress: object, where: str) -> Compression | None:
    """Return the compression of reductions, None for None.

    It may be a name such as ``"int8"``, a table, or a ``Compression``. Raises ValueError for
    anything else.
    """
    try:
        return Compression.parse(compress)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def check_backend(backend: object, where: str) -> str | None:
    """Return ``backend``; raise ValueError unless it names registered backends (or is None)."""
    if backend is None:
        return None
    if not isinstance(backend, str):
        raise ValueError(f"{where}: backend {backend!r}; expected a registered backend's name")
    from meshlib._groups.backend import parse_backend  # only configs with a backend load it

    try:
        parse_backend(backend)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return backend


def check_shape(shape: Sequence[int], where: str = "mesh_shape") -> tuple[int, ...]:
    """Return ``shape`` as integers, of which one may be -1; raise ValueError for a wrong shape."""
    if isinstance(shape, (str, bytes)):
        raise ValueError(f"{where} {shape!r} is a string; expected integers such as (2, 2)")
    try:
        sizes = tuple(shape)
    except TypeError:
        raise ValueError(f"{where} {shape!r} is not a sequence; expected e.g. (2, 2)") from None
    if not sizes:
        raise ValueError(f"{where} is empty; expected at least one dim")
    result = [check_degree(f"dim {i}", size, f"{where} {sizes!r}") for i, size in enumerate(sizes)]
    check_one_inferred(result, f"{where} {sizes!r}")
    return tuple(result)


def check_dim_names(names: Sequence[object] | None, ndim: int) -> tuple[str | None, ...]:
    """Return one name per dim, all None without ``names``; raise ValueError for repeated names."""
    if names is None:
        return (None,) * ndim
    if isinstance(names, str):
        raise ValueError(f"mesh_dim_names {names!r} is a string; expected a tuple of {ndim} names")
    if not isinstance(names, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"mesh_dim_names {names!r} is not a sequence; expected {ndim} names")
    found = tuple(names)
    if len(found) != ndim:
        raise ValueError(
            f"mesh_dim_names {found!r} has {len(found)} names, expected one for each of {ndim} dims"
        )
    result: list[str] = []
    for name in found:
        if not isinstance(name, str) or not name:
            raise ValueError(f"mesh_dim_names {found!r}: {name!r} is not a non-empty string")
        if name in result:
            raise ValueError(f"mesh_dim_names {found!r}: {name!r} is there twice; expected unique")
        result.append(name)
    return tuple(result)


def infer_sizes(
    sizes: Sequence[int], total: int, described: str, of: str = "the world size"
) -> tuple[int, ...]:
    """Return ``sizes`` with -1 replaced so that the product is ``total``.

    Raises ValueError, which names both numbers, when that is impossible without rounding.
    ``described`` is the user's text for the mesh, ``of`` names ``total`` in errors.
    """
    known = math.prod(size for size in sizes if size != INFER)
    if INFER not in sizes:
        if known != total:
            raise ValueError(f"{described} needs {known} ranks, but {of} is {total}")
        return tuple(sizes)
    if total % known:
        raise ValueError(
            f"{described}: the other dims have the product {known}, which does not divide"
            f" {total}, {of}"
        )
    return tuple(total // known if size == INFER else size for size in sizes)


def describe_dims(names: Sequence[str | None], sizes: Sequence[int]) -> str:
    """Return ``dp=2 × tp=2``, or ``2 × 2`` without names."""
    return " × ".join(
        f"{size}" if name is None else f"{name}={size}"
        for name, size in zip(names, sizes, strict=True)
    )
