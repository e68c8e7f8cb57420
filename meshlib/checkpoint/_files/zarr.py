"""The parts of Zarr version 3 that checkpoints use: documents of groups and arrays, and files.

An array is a regular grid of chunks, one file each (``c.0.1``). All chunks have one size, even the
last along a dim. In checkpoints, a chunk is its elements in C order, little-endian, and their
CRC-32C (4 bytes): the codecs ``bytes`` and ``crc32c``. Dtypes that the specification lacks have
their NumPy name (``bfloat16``), as other writers use it. The specification is
https://zarr-specs.readthedocs.io/en/latest/v3/core/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.checkpoint._errors import CheckpointError

DOCUMENT = "zarr.json"
CHECKSUM_BYTES = 4

_KINDS = frozenset("biufc")
_MOST_DIMS = 64  # NumPy's
_MOST_BYTES = (1 << 63) - 1
_SHOWN = 100


def dtype_name(dtype: np.dtype[Any], where: str) -> str:
    """Return Zarr's name of a dtype; raise TypeError, which names ``where``, if it has none."""
    # Dtypes of ml_dtypes have the kind "V", like structures, but other names.
    known = dtype.kind in _KINDS or (dtype.kind == "V" and not dtype.name.startswith("void"))
    if known and dtype.names is None and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype.name
    raise TypeError(
        f"state{where} has dtype {dtype}; expected bool, integers, floating point or complex"
    )


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of this name; raise CheckpointError for an unknown one."""
    found = _numpy_dtype(name)
    try:
        if found is not None and dtype_name(found, "") == name:
            return found
    except TypeError:  # of objects, text, structures
        pass
    raise CheckpointError(
        f"the checkpoint has arrays of the unknown dtype {name!r} (bfloat16 and other small floats"
        " need the package ml_dtypes)"
    )


def _numpy_dtype(name: Any) -> np.dtype[Any] | None:
    if not isinstance(name, str):
        return None
    try:
        return np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        return None


@dataclass(frozen=True)
class ChunkGrid:
    """An array that is stored in chunks: its shape, the chunks' shape, and its dtype."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each dim."""
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return tuple(-(-length // chunk) for length, chunk in pairs)

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return math.prod(self.counts)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk's elements."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> tuple[slice, ...]:
        """The slices of the whole array."""
        return tuple(slice(0, length) for length in self.shape)

    def box(self, index: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of the array in a chunk, cut off at the end of the array."""
        return tuple(
            slice(i * chunk, min((i + 1) * chunk, length))
            for i, chunk, length in zip(index, self.chunk_shape, self.shape, strict=True)
        )

    def overlapping(self, box: Sequence[slice]) -> Iterator[tuple[int, ...]]:
        """Yield the indices of the chunks that overlap ``box``, in C order."""
        if any(part.start >= part.stop for part in box):
            return
        yield from product(
            *(
                range(part.start // chunk, -(-part.stop // chunk))
                for part, chunk in zip(box, self.chunk_shape, strict=True)
            )
        )

    def number_of(self, index: Sequence[int]) -> int:
        """Return the position in C order of the chunk at ``index``, from 0."""
        number = 0
        for i, count in zip(index, self.counts, strict=True):
            number = number * count + i
        return number

    def all_chunks(self) -> Iterator[tuple[int, ...]]:
        """Yield the indices of all chunks, in C order."""
        return self.overlapping(self.whole)


def chunk_file(array: str, index: Sequence[int]) -> str:
    """Return the name of a chunk's file: ``model/weight/c.0.1``."""
    return f"{array}/{'.'.join(['c', *map(str, index)])}"


def array_document(grid: ChunkGrid, name: str) -> dict[str, Any]:
    """Return an array's ``zarr.json``."""
    complex_ = grid.dtype.kind == "c"
    zero: Any = [0.0, 0.0] if complex_ else False if grid.dtype.kind == "b" else 0
    if grid.dtype.kind in "fV":
        zero = 0.0
    # A single byte has no byte order, and readers reject one.
    single = grid.dtype.itemsize == 1
    order = {} if single else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(grid.shape),
        "data_type": dtype_name(grid.dtype, f" {name}"),
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(grid.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": zero,
        "codecs": [{"name": "bytes", **order}, {"name": "crc32c"}],
        # xarray needs names. They differ between arrays, because it requires equal lengths of dims
        # with one name.
        "dimension_names": [f"{name.rpartition('/')[2]}.{d}" for d in range(len(grid.shape))],
        "attributes": {},
    }


def grid_of(document: Mapping[str, Any], name: str) -> ChunkGrid:
    """Return the grid that an array's document describes.

    Raises CheckpointError for a document that ``array_document`` did not write.
    """
    try:
        dtype, codecs = dtype_of(document["data_type"]), document["codecs"]
        shape = _lengths(document["shape"], least=0)
        chunk_shape = _lengths(document["chunk_grid"]["configuration"]["chunk_shape"], least=1)
    except KeyError as error:
        raise CheckpointError(f"array {name!r} has no {error} in its description") from None
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"array {name!r} has a bad description: {error}") from None
    fits = len(shape) == len(chunk_shape) and all(
        chunk <= max(length, 1) for length, chunk in zip(shape, chunk_shape, strict=False)
    )
    size = math.prod(max(length, 1) for length in shape) * dtype.itemsize
    if not fits or len(shape) > _MOST_DIMS or size > _MOST_BYTES:
        raise CheckpointError(
            f"array {name!r} has the shape {_short(shape)} and chunks of {_short(chunk_shape)};"
            f" expected shapes of equal length, chunks no longer than the array, at most"
            f" {_MOST_DIMS} dims and less than 2**63 bytes"
        )
    grid = ChunkGrid(shape, chunk_shape, dtype)
    if array_document(grid, name)["codecs"] != codecs:
        raise CheckpointError(f"array {name!r} has the codecs {codecs}; expected bytes and crc32c")
    return grid


def _lengths(value: Any, *, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= least for n in value):
        raise ValueError(f"got {_short(value)}; expected integers of at least {least}")
    return tuple(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_name(name: str) -> None:
    """Raise CheckpointError for an array's name that leads out of the checkpoint's folder."""
    if not all(part.strip(".") for part in name.split("/")) or "\0" in name or "\\" in name:
        raise CheckpointError(
            f"the checkpoint has an array of the name {name!r}; expected parts separated by /,"
            " none of them empty or only dots"
        )


def group_document(
    attributes: Mapping[str, Any], members: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a group's ``zarr.json``; ``members`` are the documents of all its descendants."""
    document: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(attributes),
    }
    if members is not None:
        document["consolidated_metadata"] = {
            "kind": "inline",
            "must_understand": False,
            "metadata": dict(members),
        }
    return document


def groups_above(names: Sequence[str]) -> list[str]:
    """Return the groups between the root and the arrays, the outer ones first."""
    found = {up for name in names for up in accumulate(name.split("/")[:-1], "{}/{}".format)}
    return sorted(found, key=lambda group: (group.count("/"), group))


def little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``array`` with little-endian elements; a copy only if the byte order differs."""
    big = array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big")
    return array.astype(array.dtype.newbyteorder("<")) if big else array
