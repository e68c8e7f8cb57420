"""Saving: agree on the tree, write one's chunks, and make it all be there at once.

1. Each rank flattens its state; digests are compared, and where they differ the first difference
   is named. The first rank says which folder it will be.
2. Each rank writes the chunks that are its own (``meshlib.checkpoint.layout``).
3. When all have told that theirs are on the disk, the first rank writes the ``zarr.json`` at the
   top, under another name, and renames it: that is when the checkpoint is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib.checkpoint.agreement import Party, first_difference
from meshlib.checkpoint.errors import CheckpointError
from meshlib.checkpoint.folder import Entry, check_step, entries_of, make_document
from meshlib.checkpoint.layout import Index, Writers, aligned, chunked, members_outside
from meshlib.checkpoint.leaves import Box, Host, check_saved, is_array, sharding_of, to_host
from meshlib.checkpoint.storage import BLOCK, Storage
from meshlib.checkpoint.tree import array_of, encode, leaves_of, shown
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
from transport.errors import DistError

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


class Save:
    """One checkpoint on its way. Made and written by all ranks of ``party`` together.

    Raises what ``meshlib.checkpoint.save`` says.
    """

    _storage: Storage

    def __init__(
        self,
        party: Party,
        storage: Callable[[], Storage],
        state: Any,
        step: int,
        metric: float | None,
    ) -> None:
        self._party = party
        self._step, self._metric = -1, metric
        encoded, told = self._agree(storage, state, step)
        self._tree, arrays = encoded
        self.entry = told
        self._documents: dict[str, Any] = {}
        self.pieces: list[Piece] = []
        self._own_documents: list[str] = []
        writers = Writers(party.ranks, party.rank)
        for name, leaf in arrays.items():
            # Partial values are reduced here, and shards that make no grid gathered: all ranks
            # have the same arrays in the same order.
            self._lay_out(name, leaf, writers)

    # ------------------------------------------------------------------ agreeing

    def _agree(
        self, storage: Callable[[], Storage], state: Any, step: int
    ) -> tuple[tuple[Any, dict[str, Any]], Entry]:
        party = self._party

        def begin() -> tuple[str, Entry | None]:
            # In here, so that what is wrong on one rank is raised on all.
            self._storage = storage()
            self._step, self._metric = check_step(step), check_metric(self._metric)
            tree, arrays = encode(state, is_array)
            for name, leaf in arrays.items():
                check_saved(name, leaf)
            lines = _lines(tree, arrays)
            outside = members_outside(map(sharding_of, arrays.values()), party.ranks)
            if outside:
                raise CheckpointError(
                    f"the state has arrays on ranks {outside}, which do not take part; expected"
                    f" them to be among the group's {list(party.ranks)}"
                )
            digest = sha256(json.dumps(lines).encode()).hexdigest()
            own.append((tree, arrays, lines))
            entry = self._new_entry() if party.is_first else None
            return f"{digest} step {self._step} metric {self._metric}", entry

        own: list[tuple[Any, dict[str, Any], dict[str, str]]] = []
        told = party.gather(begin)
        tree, arrays, lines = own[0]
        entry = told[0][1]
        assert entry is not None
        if any(digest != told[0][0] for digest, _ in told):
            lines = {"'s step": str(self._step), "'s metric": str(self._metric), **lines}
            difference = first_difference(party.ranks, party.gather(lambda: lines))
            raise CheckpointError(
                f"{difference}; expected the same tree on all ranks (what differs by rank is a"
                " DArray, or not in it)"
            )
        return (tree, arrays), entry

    def _new_entry(self) -> Entry:
        """Return a folder that is not there yet, after removing what others left unfinished."""
        complete, others = entries_of(self._storage)
        used = [e.generation for e in (*complete, *others) if e.step == self._step]
        for entry in others:
            self._storage.remove(entry.name, DOCUMENT)
        return Entry(self._step, max(used, default=-1) + 1)

    def _lay_out(self, name: str, leaf: Any, writers: Writers) -> None:
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
        self._documents[name] = array_document(grid, name)
        indices = list(writers.deal(grid, sharding))
        if not indices:
            return
        host = to_host(leaf)
        assert host is not None
        origin = sharding.slices(shape, self._party.rank) if sharding is not None else _whole(shape)
        for index in indices:
            part = host[relative(grid.box(index), origin)]
            self.pieces.append(Piece(name, index, grid, part))
        if not any(indices[0]):
            self._own_documents.append(name)  # who has the first chunk writes the description

    # ------------------------------------------------------------------ writing

    @property
    def nbytes(self) -> int:
        """The bytes that this rank writes."""
        return sum(piece.data.nbytes for piece in self.pieces)

    def detach(self, room: Room | None = None) -> Room:
        """Copy what is to be written, so that the state may change; return the memory used.

        ``room``, what an earlier call returned, is used again if it is large enough: fresh memory
        costs more than the copy.
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
        return room

    def write(self, committed: Callable[[Storage], None] | None = None) -> str:
        """Write this rank's chunks; return the path when the checkpoint is complete.

        The first rank then calls ``committed``, before the others go on.
        """
        storage, folder = self._storage, self.entry.name

        def write_own() -> tuple[str, str | None]:
            for piece in self.pieces:
                piece.write(storage, folder)
            for name in self._own_documents:
                self._write_document(f"{folder}/{name}", self._documents[name])
            if self._party.is_first:
                for name, document in self._documents.items():
                    if 0 in document["shape"]:  # has no first chunk
                        self._write_document(f"{folder}/{name}", document)
                for group in groups_above(list(self._documents)):
                    self._write_document(f"{folder}/{group}", group_document({}, None))
            storage.sync()
            place = storage.place
            if not self.pieces:
                return place, None
            return place, f"{folder}/{chunk_file(self.pieces[-1].array, self.pieces[-1].index)}"

        def commit() -> None:
            self._check_seen(written)
            groups = groups_above(list(self._documents))
            document = make_document(self._step, self._metric, self._tree, self._documents, groups)
            try:
                storage.publish(self.entry.document, document)
            except Exception:
                # Nobody writes any more. It may be there whole, but perhaps not for good.
                storage.forget()
                storage.remove(folder, DOCUMENT)
                raise
            complete, others = entries_of(storage)
            for entry in others:
                # This step's earlier ones, which this one replaces.
                if entry.step == self._step and self.entry in complete:
                    storage.remove(entry.name, DOCUMENT)
            if committed is not None:
                committed(storage)

        try:
            written = self._party.gather(write_own)
        except Exception as error:
            storage.forget()
            # Of a rank that told; none writes any more. What a dead one leaves the next save finds.
            if self._party.is_first and not isinstance(error, DistError):
                storage.remove(folder, DOCUMENT)
            raise
        try:
            self._party.of_first(commit)
        except Exception:
            storage.forget()
            raise
        return storage.path(folder)

    def _check_seen(self, written: Sequence[tuple[str, str | None]]) -> None:
        """Raise CheckpointError unless the first rank finds what the others say they have written.

        It looks for one file of each place: a folder on a machine's own disk has the same path
        on all of them, and each would keep a part of a checkpoint that counts as complete.
        """
        ranks, storage = self._party.ranks, self._storage
        files = {
            place: (rank, file) for rank, (place, file) in zip(ranks, written, strict=True) if file
        }
        for rank, file in files.values():
            if not storage.exists(file):
                storage.remove(self.entry.name, DOCUMENT)
                raise CheckpointError(
                    f"rank {rank} has written {file}, but rank {ranks[0]} finds no"
                    f" {storage.path(file)}; expected a path that leads to one folder on all ranks"
                )

    def _write_document(self, name: str, document: Any) -> None:
        data = json.dumps(document).encode()
        self._storage.write(f"{name}/{DOCUMENT}", [memoryview(data)])


def _lines(tree: Any, arrays: dict[str, Any]) -> dict[str, str]:
    """Return what must be the same on all ranks: a line for each leaf, by its path."""
    lines: dict[str, str] = {}
    for path, leaf in leaves_of(tree):
        name = array_of(leaf)
        lines[shown(path)] = json.dumps(leaf) if name is None else _array_line(arrays[name])
    return lines


def _array_line(leaf: Any) -> str:
    sharding = sharding_of(leaf)
    line = f"an array of {np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    if sharding is None:
        return line
    mesh = sharding.mesh
    ranks = mesh.described_ranks() if mesh.slice_count == 1 else f"{mesh.slices().tolist()}"
    return f"{line}, {sharding.described()} on {mesh.described()} of ranks {ranks}"


def _whole(shape: tuple[int, ...]) -> Box:
    return tuple(slice(0, n) for n in shape)


def check_metric(metric: Any) -> float | None:
    """Return ``metric`` as a float, None if there is none; raise ValueError unless finite."""
    if metric is None:
        return None
    value = float(metric)
    if not math.isfinite(value):
        raise ValueError(f"metric is {value}; expected a finite number")
    return value
