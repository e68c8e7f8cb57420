"""One rank's part of a checkpoint: chunks that are views of arrays, or copies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshlib._mesh.value import described_ranks
from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.layout import Index, Writers, aligned, chunked, members_outside
from meshlib.checkpoint._files.storage import BLOCK, Storage
from meshlib.checkpoint._files.zarr import (
    CHECKSUM_BYTES,
    DOCUMENT,
    ChunkGrid,
    array_document,
    chunk_file,
    group_document,
    groups_above,
    little_endian,
)
from meshlib.checkpoint._leaves import Host, check_saved, sharding_of, to_host
from meshlib.checkpoint._participants import Participants
from meshlib.sharding._local import relative
from meshlib.sharding._sharding import Sharding
from transport._crc32c import crc32c

Room = npt.NDArray[np.uint8]


@dataclass
class ChunkWrite:
    """A chunk that this rank writes: its elements, as a view of the array or a copy."""

    array: str
    index: Index
    grid: ChunkGrid
    data: Host

    def write(self, storage: Storage, folder: str) -> int:
        """Write the chunk, padded with zeros to full size, and its checksum; return the latter."""
        data = little_endian(self.data)
        if data.shape != self.grid.chunk_shape:
            whole = np.zeros(self.grid.chunk_shape, data.dtype)
            whole[tuple(slice(0, n) for n in data.shape)] = data
            data = whole
        data = np.ascontiguousarray(data)
        octets = data.reshape(-1).view(np.uint8).data
        crc = 0

        def parts() -> Iterator[memoryview]:
            nonlocal crc
            for begin in range(0, len(octets), BLOCK):
                block = octets[begin : begin + BLOCK]
                crc = crc32c(block, crc)
                yield block
            yield memoryview(crc.to_bytes(CHECKSUM_BYTES, "little"))

        storage.write(f"{folder}/{chunk_file(self.array, self.index)}", parts())
        return crc


Checksums = dict[str, dict[Index, int]]
"""The checksum of each chunk by its index, by array."""


class ArrayEntry(NamedTuple):
    """The description of an array of a state, without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding | None

    @classmethod
    def of(cls, name: str, leaf: Any) -> ArrayEntry:
        """Describe the array ``leaf``; raise TypeError, which names it, if it cannot be saved."""
        check_saved(name, leaf)
        return cls(name, tuple(leaf.shape), np.dtype(leaf.dtype), sharding_of(leaf))

    def line(self) -> str:
        """Return the properties that must be equal on all ranks."""
        line = f"an array of {self.dtype.name}{list(self.shape)}"
        if self.sharding is None:
            return line
        mesh = self.sharding.mesh
        ranks = described_ranks(mesh) if mesh.slice_count == 1 else f"{mesh.slices().tolist()}"
        return f"{line}, {self.sharding.described()} on {mesh.described()} of ranks {ranks}"


class ChunkShares:
    """The chunks of all arrays, and this rank's share of them.

    It holds no values, so a ``Checkpointer`` reuses it for every state with the same ``arrays``.
    ``documents`` has the Zarr document of each array. ``first_chunks`` names the arrays whose first
    chunk, and so whose document, this rank writes. Arrays with partial values, or with parts that
    do not form a grid, must be redistributed first; ``moved`` has their target shardings. Raises
    CheckpointError for arrays on ranks outside of the group.
    """

    def __init__(self, participants: Participants, arrays: tuple[ArrayEntry, ...]) -> None:
        outside = members_outside((kept.sharding for kept in arrays), participants.ranks)
        if outside:
            raise CheckpointError(
                f"the state has arrays on ranks {outside}, which do not take part; expected"
                f" them to be among the group's {list(participants.ranks)}"
            )
        self.arrays = arrays
        self.documents: dict[str, Any] = {}
        self._grids: dict[str, ChunkGrid] = {}
        self.first_chunks: list[str] = []
        self.moved: dict[str, Sharding] = {}
        # By array: this rank's chunks, and their slices in its part of the array.
        self._chunks: dict[str, list[tuple[Index, tuple[Any, ...]]]] = {}
        writers = Writers(participants.ranks, participants.rank)
        for kept in arrays:
            self._assign_chunks(writers, participants, kept)

    def _assign_chunks(
        self, writers: Writers, participants: Participants, kept: ArrayEntry
    ) -> None:
        name, shape, dtype, sharding = kept
        count = len(participants.ranks)
        if sharding is not None:
            landed = aligned(sharding, shape)
            if landed != sharding:
                self.moved[name] = landed
            sharding = landed
            count = sharding.replica_count * sharding.mesh.slice_count
        grid = chunked(shape, dtype, sharding, count)
        self._grids[name] = grid
        self.documents[name] = array_document(grid, name)
        indices = list(writers.assign_chunks(grid, sharding))
        if not indices:
            return
        origin = sharding.slices(shape, participants.rank) if sharding is not None else grid.whole
        self._chunks[name] = [(index, relative(grid.box(index), origin)) for index in indices]
        if not any(indices[0]):
            self.first_chunks.append(name)

    @cached_property
    def lines(self) -> dict[str, str]:
        """The properties of each array that must be equal on all ranks, by array name."""
        return {kept.name: kept.line() for kept in self.arrays}

    def pieces(self, leaves: Mapping[str, Any]) -> list[ChunkWrite]:
        """Return this rank's chunks of the arrays ``leaves``, by name, as views.

        All ranks must call it, because arrays in ``moved`` are redistributed.
        """
        pieces: list[ChunkWrite] = []
        for name, leaf in leaves.items():
            moved = self.moved.get(name)
            landed = leaf if moved is None else leaf.redistribute(moved)
            if name in self._chunks:
                grid, host = self._grids[name], to_host(landed)
                assert host is not None
                pieces += [
                    ChunkWrite(name, index, grid, host[box]) for index, box in self._chunks[name]
                ]
        return pieces

    def write(
        self, pieces: Sequence[ChunkWrite], storage: Storage, folder: str, *, first: bool
    ) -> Checksums:
        """Write this rank's chunks; return their checksums.

        The ``first`` rank also writes the data that belongs to no chunk.
        """
        checksums: Checksums = {}
        for piece in pieces:
            checksums.setdefault(piece.array, {})[piece.index] = piece.write(storage, folder)
        for name in self.first_chunks:
            write_document(storage, f"{folder}/{name}", self.documents[name])
        if first:
            for name, document in self.documents.items():
                if 0 in document["shape"]:  # has no first chunk
                    write_document(storage, f"{folder}/{name}", document)
            for group in groups_above(list(self.documents)):
                write_document(storage, f"{folder}/{group}", group_document({}, None))
        return checksums

    def in_order(self, sums: Iterable[Checksums]) -> dict[str, list[int]]:
        """Merge the ranks' checksums; return those of each array's chunks, in C order."""
        found: Checksums = {name: {} for name in self._grids}
        for one in sums:
            for name, checksums in one.items():
                found[name].update(checksums)
        return {
            name: [found[name][index] for index in grid.all_chunks()]
            for name, grid in self._grids.items()
        }


def detach(pieces: Sequence[ChunkWrite], room: Room | None = None) -> Room:
    """Copy the pieces into ``room``, so that the state may change; return the memory used.

    A ``room`` that is None or too small is replaced. Reuse it: fresh memory costs more than the
    copy.
    """
    # Each piece begins at a multiple of 64 bytes, which is aligned for any dtype.
    sizes = [-(-piece.data.nbytes // 64) * 64 for piece in pieces]
    if room is None or room.size < sum(sizes):
        room = np.empty(sum(sizes), np.uint8)
    begin = 0
    for piece, size in zip(pieces, sizes, strict=True):
        flat = room[begin : begin + piece.data.nbytes].view(piece.data.dtype)
        copy = flat.reshape(piece.data.shape)
        copy[...] = piece.data
        piece.data = copy
        begin += size
    return room


def write_document(storage: Storage, name: str, document: Any) -> None:
    """Write the document of the array or group ``name``."""
    storage.write(f"{name}/{DOCUMENT}", [memoryview(json.dumps(document).encode())])
