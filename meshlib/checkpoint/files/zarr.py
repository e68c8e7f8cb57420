"""What a checkpoint has of Zarr, version 3: the documents of groups and arrays, and their files.

https://zarr-specs.readthedocs.io/en/latest/v3/core/: an array is a regular grid of chunks, a file
each (``c.0.1``), of which the last along a dim is as large as the others. Here a chunk is its
elements in C order, little-endian, and the CRC-32C of them (4 bytes): the codecs ``bytes`` and
``crc32c``. Types that the specification does not have go by their name in NumPy, as other writers
do (``bfloat16``).
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

from meshlib.checkpoint.errors import CheckpointError

DOCUMENT = "zarr.json"
CHECKSUM_BYTES = 4

_KINDS = frozenset("biufc")


def dtype_name(dtype: np.dtype[Any], where: str) -> str:
    """Return Zarr's name of a dtype; raise TypeError, naming ``where``, for one without."""
    # Those of ml_dtypes are of the kind "V", as structures are, which have other names.
    known = dtype.kind in _KINDS or (dtype.kind == "V" and not dtype.name.startswith("void"))
    if known and dtype.names is None and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        return dtype.name
    raise TypeError(
        f"state{where} has dtype {dtype}; expected bool, integers, floating point or complex"
    )


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of this name. Raises CheckpointError for one that is not known."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError, TypeError):
        raise CheckpointError(
            f"the checkpoint has arrays of {name}, for which there is no dtype here (bfloat16 and"
            " its kind need the package ml_dtypes)"
        ) from None


@dataclass(frozen=True)
class ChunkGrid:
    """An array that is kept in chunks: its shape, theirs, and its dtype."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many chunks there are along each dim."""
        pairs = zip(self.shape, self.chunk_shape, strict=True)
        return tuple(-(-length // chunk) for length, chunk in pairs)

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
        """All of the array, as a part of it."""
        return tuple(slice(0, length) for length in self.shape)

    def box(self, index: Sequence[int]) -> tuple[slice, ...]:
        """Return the part of the array that a chunk has; the last ones may reach beyond it."""
        return tuple(
            slice(i * chunk, min((i + 1) * chunk, length))
            for i, chunk, length in zip(index, self.chunk_shape, self.shape, strict=True)
        )

    def overlapping(self, box: Sequence[slice]) -> Iterator[tuple[int, ...]]:
        """Yield the chunks that have something of ``box``, in C order."""
        if any(part.start >= part.stop for part in box):
            return
        yield from product(
            *(
                range(part.start // chunk, -(-part.stop // chunk))
                for part, chunk in zip(box, self.chunk_shape, strict=True)
            )
        )

    def all_chunks(self) -> Iterator[tuple[int, ...]]:
        """Yield all chunks, in C order."""
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
    # A single byte has no order, and readers object to one.
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
        # xarray asks for names; each array has its own, as their lengths have nothing in common.
        "dimension_names": [f"{name.rpartition('/')[2]}.{d}" for d in range(len(grid.shape))],
        "attributes": {},
    }


def grid_of(document: Mapping[str, Any], name: str) -> ChunkGrid:
    """Return the grid that an array's document describes.

    Raises CheckpointError for what is not written as ``array_document`` says.
    """
    try:
        shape, chunks = document["shape"], document["chunk_grid"]["configuration"]["chunk_shape"]
        grid = ChunkGrid(tuple(shape), tuple(chunks), dtype_of(document["data_type"]))
        good = all(map(document.__contains__, ("codecs", "fill_value")))
        if good and array_document(grid, name)["codecs"] == document["codecs"]:
            return grid
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"array {name!r} has no {error} in its description") from None
    raise CheckpointError(
        f"array {name!r} has the codecs {document.get('codecs')}; expected bytes and crc32c"
    )


def group_document(
    attributes: Mapping[str, Any], members: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a group's ``zarr.json``; ``members`` are the documents of all that lies below it."""
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
    """Return ``array`` as a chunk has it: itself, unless its bytes are in the other order."""
    big = array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big")
    return array.astype(array.dtype.newbyteorder("<")) if big else array
