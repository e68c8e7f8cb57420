"""What one rank writes of a checkpoint: its chunks, as views of the arrays or as copies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.checkpoint.agreement import Party
from meshlib.checkpoint.layout import Index, Writers, aligned, chunked
from meshlib.checkpoint.leaves import Box, Host, to_host
from meshlib.checkpoint.storage import BLOCK, Storage
from meshlib.checkpoint.zarr import (
    CHECKSUM_BYTES,
    DOCUMENT,
    ChunkGrid,
    array_document,
    chunk_file,
    group_document,
    groups_above,
    little_endian,
)
from meshlib.sharding.darray import DArray
from meshlib.sharding.local import relative
from meshlib.sharding.sharding import Sharding
from transport.crc32c import crc32c

Room = npt.NDArray[np.uint8]


@dataclass
class Piece:
    """A chunk that this rank writes: what of it lies in the array, as a view or a copy."""

    array: str
    index: Index
    grid: ChunkGrid
    data: Host

    def write(self, storage: Storage, folder: str) -> None:
        """Write it, padded with zeros to the size of a chunk, and its checksum."""
        data = little_endian(self.data)
        if data.shape != self.grid.chunk_shape:
            whole = np.zeros(self.grid.chunk_shape, data.dtype)
            whole[tuple(slice(0, n) for n in data.shape)] = data
            data = whole
        data = np.ascontiguousarray(data)
        octets = data.reshape(-1).view(np.uint8).data
        storage.write(f"{folder}/{chunk_file(self.array, self.index)}", _with_checksum(octets))


def _with_checksum(octets: memoryview) -> Iterator[memoryview]:
    """Yield the blocks of a chunk and then its checksum, which is computed as they go by."""
    crc = 0
    for begin in range(0, len(octets), BLOCK):
        block = octets[begin : begin + BLOCK]
        crc = crc32c(block, crc)
        yield block
    yield memoryview(crc.to_bytes(CHECKSUM_BYTES, "little"))


def needs_messages(leaf: Any) -> bool:
    """Whether an array has to be laid out anew before: partial values, parts that make no grid."""
    return isinstance(leaf, DArray) and aligned(leaf.sharding, leaf.shape) != leaf.sharding


class OwnPart:
    """The ``pieces`` that this rank writes of the arrays that were laid out, all ranks the same.

    ``documents`` are those of all arrays; ``first_chunks`` names the arrays of which this rank has
    the first chunk, and so writes the document. ``room`` is the memory of copies.
    """

    def __init__(self, party: Party) -> None:
        self._party = party
        self._writers = Writers(party.ranks, party.rank)
        self.documents: dict[str, Any] = {}
        self.pieces: list[Piece] = []
        self.first_chunks: list[str] = []
        self.room: Room | None = None

    def lay_out(self, name: str, leaf: Any) -> None:
        """Find out in which chunks an array is kept, and which of them are this rank's.

        Called by all ranks, which communicate where ``needs_messages`` says so.
        """
        sharding: Sharding | None = None
        if isinstance(leaf, DArray):
            sharding = aligned(leaf.sharding, leaf.shape)
            if sharding != leaf.sharding:
                leaf = leaf.redistribute(sharding)
        shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
        count = len(self._party.ranks)
        if sharding is not None:
            count = sharding.replica_count * sharding.mesh.slice_count
        grid = chunked(shape, dtype, sharding, count)
        self.documents[name] = array_document(grid, name)
        indices = list(self._writers.deal(grid, sharding))
        if not indices:
            return
        host = to_host(leaf)
        assert host is not None
        origin = sharding.slices(shape, self._party.rank) if sharding is not None else _whole(shape)
        for index in indices:
            part = host[relative(grid.box(index), origin)]
            self.pieces.append(Piece(name, index, grid, part))
        if not any(indices[0]):
            self.first_chunks.append(name)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes."""
        return sum(piece.data.nbytes for piece in self.pieces)

    def write(self, storage: Storage, folder: str) -> str | None:
        """Write what is this rank's; return the name of one of its chunks, None if it has none."""
        for piece in self.pieces:
            piece.write(storage, folder)
        for name in self.first_chunks:
            _write_document(storage, f"{folder}/{name}", self.documents[name])
        if self._party.is_first:
            for name, document in self.documents.items():
                if 0 in document["shape"]:  # has no first chunk
                    _write_document(storage, f"{folder}/{name}", document)
            for group in groups_above(list(self.documents)):
                _write_document(storage, f"{folder}/{group}", group_document({}, None))
        if not self.pieces:
            return None
        last = self.pieces[-1]
        return f"{folder}/{chunk_file(last.array, last.index)}"

    def detach(self, room: Room | None = None) -> None:
        """Copy what is to be written, so that the state may change, into ``room``.

        What an earlier call used is used again if it is large enough: fresh memory costs more than
        the copy.
        """
        # Each at a multiple of 64, at which any dtype may begin.
        sizes = [-(-piece.data.nbytes // 64) * 64 for piece in self.pieces]
        if room is None or room.size < sum(sizes):
            room = np.empty(sum(sizes), np.uint8)
        begin = 0
        for piece, size in zip(self.pieces, sizes, strict=True):
            flat = room[begin : begin + piece.data.nbytes].view(piece.data.dtype)
            copy = flat.reshape(piece.data.shape)
            copy[...] = piece.data
            piece.data = copy
            begin += size
        self.room = room


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, n) for n in shape)


def _write_document(storage: Storage, name: str, document: Any) -> None:
    storage.write(f"{name}/{DOCUMENT}", [memoryview(json.dumps(document).encode())])
