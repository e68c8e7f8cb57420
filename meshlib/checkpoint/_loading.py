"""Loading: each rank reads its part of every array, however the array was cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from meshlib.checkpoint._errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint._files.folder import Description, check_step, find
from meshlib.checkpoint._files.layout import Index
from meshlib.checkpoint._files.locations import open_storage
from meshlib.checkpoint._files.storage import BLOCK
from meshlib.checkpoint._files.zarr import CHECKSUM_BYTES, ChunkGrid, chunk_file
from meshlib.checkpoint._leaves import Host, Target, target_like
from meshlib.checkpoint._participants import Participants
from meshlib.checkpoint._tree import Maker, Matching
from meshlib.sharding._local import Box, intersection, relative, shape_of
from transport._crc32c import crc32c


def load_like(
    participants: Participants, path: Any, step: Any, like: Any, *, strict: bool, verify: bool
) -> Any:
    """Return the state of a checkpoint, laid out as ``like``. See ``meshlib.checkpoint.load``."""
    found = _find_together(participants, path, step)

    def match() -> tuple[Maker, dict[str, Target]]:
        matching = Matching(found.grids, strict=strict)
        make = matching.match(found.tree, like)
        matching.check(found.path)
        return make, {
            name: target_like(found.grids[name], leaf) for name, leaf in matching.wanted.items()
        }

    own: list[tuple[Maker, dict[str, Target]]] = []
    participants.gather(lambda: own.append(match()))
    make, targets = own[0]
    loaded: dict[str, Any] = {}

    def read() -> None:
        chunks = ChunkReader(found, verify=verify)
        for name, (box, finish) in targets.items():
            loaded[name] = finish(None if box is None else chunks.read(name, box))

    # No rank returns arrays before all ranks have read theirs.
    participants.gather(read)
    return make(loaded.__getitem__)


def _find_together(participants: Participants, path: Any, step: Any) -> Description:
    """Return the checkpoint that the first rank finds.

    Only one rank searches, because the newest checkpoint may change meanwhile. Raises one rank's
    argument errors on every rank, and CheckpointError for different values of ``step``.
    """

    def look() -> tuple[int | None, Description | None]:
        number = None if step is None else check_step(step)
        open_storage(path)
        return number, find(path, number) if participants.is_first else None

    answers = participants.gather(look)
    number, found = answers[0]
    for rank, (other, _) in zip(participants.ranks, answers, strict=True):
        if other != number:
            raise CheckpointError(
                f"step is {number} on rank {participants.ranks[0]} and {other} on rank {rank};"
                " expected equal steps on all ranks"
            )
    assert found is not None
    return found


class ChunkReader:
    """A reader of parts of arrays, which reads and checks whole chunks.

    Without ``verify`` it reads only the needed parts, unchecked. ``bytes_read`` counts the bytes.
    """

    def __init__(self, found: Description, *, verify: bool = True) -> None:
        self._found = found
        self._verify = verify
        self._scratch = np.empty(0, np.uint8)
        self.bytes_read: int = 0

    def read(self, name: str, box: Box) -> Host:
        """Return the part ``box`` of the array ``name``.

        Raises CorruptCheckpointError, which names array, chunk and file.
        """
        grid = self._found.grids[name]
        chunks = list(grid.overlapping(box))
        # Check before allocating: a damaged document may claim any size.
        for index in chunks:
            self._check_size(name, grid, index)
        result = np.empty(shape_of(box), grid.dtype)
        for index in chunks:
            self._read_chunk(name, grid, index, box, result)
        return result

    def _check_size(self, name: str, grid: ChunkGrid, index: Index) -> None:
        expected = grid.chunk_bytes + CHECKSUM_BYTES
        file = chunk_file(name, index)
        try:
            size = self._found.storage.size(file)
        except FileNotFoundError:
            raise self._wrong(name, index, "is missing") from None
        if size != expected:
            raise self._wrong(name, index, f"is torn: it has {size} bytes, not {expected}")

    def _wrong(self, name: str, index: Index, what: str) -> CorruptCheckpointError:
        path = self._found.storage.path(chunk_file(name, index))
        return CorruptCheckpointError(f"array {name!r}, chunk {list(index)}: {path} {what}")

    def _read_chunk(self, name: str, grid: ChunkGrid, index: Index, box: Box, result: Host) -> None:
        has = grid.box(index)
        common = intersection(has, box)
        assert common is not None, "the chunk overlaps the box"
        target = result[relative(common, box)]
        if shape_of(common) == grid.chunk_shape and target.flags.c_contiguous:
            self._fill(target.reshape(-1).view(np.uint8).data, 0, name, grid, index)
            return
        begin, end = 0, grid.chunk_bytes
        first = 0
        if not self._verify and grid.shape:
            # The needed rows are contiguous in the chunk.
            row = grid.chunk_bytes // grid.chunk_shape[0]
            first = common[0].start - has[0].start
            begin, end = first * row, (common[0].stop - has[0].start) * row
        if self._scratch.size < end - begin:
            self._scratch = np.empty(end - begin, np.uint8)
        scratch = self._scratch[: end - begin]
        self._fill(scratch.data, begin, name, grid, index)
        rows = (-1, *grid.chunk_shape[1:]) if grid.shape else ()
        chunk = scratch.view(grid.dtype).reshape(rows)
        inside = list(relative(common, has))
        if grid.shape:
            inside[0] = slice(inside[0].start - first, inside[0].stop - first)
        target[...] = chunk[tuple(inside)]

    def _fill(
        self, octets: memoryview, offset: int, name: str, grid: ChunkGrid, index: Index
    ) -> None:
        """Read a chunk's bytes from ``offset`` on; errors name its file."""
        crc, stored = 0, bytearray(CHECKSUM_BYTES)
        try:
            with self._found.storage.open(chunk_file(name, index)) as file:
                for begin in range(0, len(octets), BLOCK):
                    block = octets[begin : begin + BLOCK]
                    file.read_into(block, offset + begin)
                    if self._verify:
                        crc = crc32c(block, crc)
                self.bytes_read += len(octets)
                if not self._verify:
                    return
                file.read_into(memoryview(stored), grid.chunk_bytes)
        except FileNotFoundError:
            raise self._wrong(name, index, "is missing") from None
        if int.from_bytes(stored, "little") != crc:
            raise self._wrong(name, index, "was changed: its checksum does not match")
        if self._found.checksum(name, index) != crc:
            raise self._wrong(
                name,
                index,
                "is not the chunk that was saved: it belongs to another step, array or index, or"
                " another job wrote it",
            )

    def check(self, name: str) -> Iterator[CorruptCheckpointError]:
        """Read all of an array; yield the error of each damaged chunk."""
        grid = self._found.grids[name]
        for index in grid.all_chunks():
            try:
                self.read(name, grid.box(index))
            except CorruptCheckpointError as error:
                yield error
