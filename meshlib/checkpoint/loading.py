"""Loading: of each array the part that a rank needs, from whatever chunks it was saved in."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshlib.checkpoint.agreement import Party
from meshlib.checkpoint.errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint.files.folder import Description, check_step, find
from meshlib.checkpoint.files.layout import Index
from meshlib.checkpoint.files.storage import BLOCK, Reader, open_storage
from meshlib.checkpoint.files.zarr import CHECKSUM_BYTES, ChunkGrid, chunk_file, grid_of
from meshlib.checkpoint.leaves import Box, Host, Target, target_like
from meshlib.checkpoint.tree import Maker, Matching
from meshlib.sharding.local import relative, shape_of
from transport.crc32c import crc32c


def load_like(party: Party, path: Any, step: Any, like: Any, *, strict: bool, verify: bool) -> Any:
    """Return the tree of a checkpoint as ``like``. See ``meshlib.checkpoint.load``."""
    found = _find_together(party, path, step)
    grids = {name: grid_of(document, name) for name, document in found.arrays.items()}

    def match() -> tuple[Maker, dict[str, Target]]:
        matching = Matching(grids, strict=strict)
        make = matching.match(found.tree, like)
        matching.check(found.path)
        return make, {
            name: target_like(matching.grid(name), leaf) for name, leaf in matching.wanted.items()
        }

    own: list[tuple[Maker, dict[str, Target]]] = []
    party.gather(lambda: own.append(match()))
    make, targets = own[0]
    loaded: dict[str, Any] = {}

    def read() -> None:
        chunks = ChunkReader(found, verify=verify)
        for name, (box, finish) in targets.items():
            loaded[name] = finish(None if box is None else chunks.read(name, grids[name], box))

    # Nobody has anything of it before all have theirs.
    party.gather(read)
    return make(loaded.__getitem__)


def _find_together(party: Party, path: Any, step: Any) -> Description:
    """Return the checkpoint that the first rank finds: the newest one may be another later.

    Raises, on every rank, what is wrong with the arguments of one, and CheckpointError for another
    ``step`` on some.
    """

    def look() -> tuple[int | None, Description | None]:
        number = None if step is None else check_step(step)
        open_storage(path)
        return number, find(path, number) if party.is_first else None

    told = party.gather(look)
    number, found = told[0]
    for rank, (other, _) in zip(party.ranks, told, strict=True):
        if other != number:
            raise CheckpointError(
                f"step is {number} on rank {party.ranks[0]} and {other} on rank {rank}; expected"
                " the same on all ranks"
            )
    assert found is not None
    return found


class ChunkReader:
    """Reads parts of arrays. Whole chunks are read and checked; without ``verify`` what is needed.

    ``bytes_read`` counts.
    """

    def __init__(self, found: Description, *, verify: bool = True) -> None:
        self._found = found
        self._verify = verify
        self._scratch = np.empty(0, np.uint8)
        self.bytes_read: int = 0

    def read(self, name: str, grid: ChunkGrid, box: Box) -> Host:
        """Return the part ``box`` of the array ``name``.

        Raises CorruptCheckpointError that names array, chunk and file.
        """
        result = np.empty(shape_of(box), grid.dtype)
        for index in grid.overlapping(box):
            self._read_chunk(name, grid, index, box, result)
        return result

    def _read_chunk(self, name: str, grid: ChunkGrid, index: Index, box: Box, result: Host) -> None:
        has = grid.box(index)
        common = tuple(
            slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(has, box, strict=True)
        )
        target = result[relative(common, box)]
        with self._opened(name, grid, index) as file:
            if shape_of(common) == grid.chunk_shape and target.flags.c_contiguous:
                octets = target.reshape(-1).view(np.uint8).data
                self._fill(octets, file, 0, name, grid, index)
                return
            begin, end = 0, grid.chunk_bytes
            first = 0
            if not self._verify and grid.shape:
                # The rows from the first to the last that is needed lie together.
                row = grid.chunk_bytes // grid.chunk_shape[0]
                first = common[0].start - has[0].start
                begin, end = first * row, (common[0].stop - has[0].start) * row
            if self._scratch.size < end - begin:
                self._scratch = np.empty(end - begin, np.uint8)
            scratch = self._scratch[: end - begin]
            self._fill(scratch.data, file, begin, name, grid, index)
        rows = (-1, *grid.chunk_shape[1:]) if grid.shape else ()
        chunk = scratch.view(grid.dtype).reshape(rows)
        inside = list(relative(common, has))
        if grid.shape:
            inside[0] = slice(inside[0].start - first, inside[0].stop - first)
        target[...] = chunk[tuple(inside)]

    def _fill(
        self,
        octets: memoryview,
        file: Reader,
        offset: int,
        name: str,
        grid: ChunkGrid,
        index: Index,
    ) -> None:
        crc = 0
        for begin in range(0, len(octets), BLOCK):
            block = octets[begin : begin + BLOCK]
            file.read_into(block, offset + begin)
            if self._verify:
                crc = crc32c(block, crc)
        self.bytes_read += len(octets)
        if not self._verify:
            return
        stored = bytearray(CHECKSUM_BYTES)
        file.read_into(memoryview(stored), grid.chunk_bytes)
        if int.from_bytes(stored, "little") != crc:
            raise self._corrupt(name, index, "was changed: its checksum is another one")

    @contextmanager
    def _opened(self, name: str, grid: ChunkGrid, index: Index) -> Generator[Reader]:
        """Open a chunk, which has the right size; what is wrong with the file names it."""
        found, expected = self._found, grid.chunk_bytes + CHECKSUM_BYTES
        try:
            with found.storage.open(found.file(chunk_file(name, index))) as file:
                if file.size != expected:
                    what = f"is torn: it has {file.size} bytes, not {expected}"
                    raise self._corrupt(name, index, what)
                yield file
        except FileNotFoundError:
            raise self._corrupt(name, index, "is missing") from None

    def _corrupt(self, name: str, index: Index, what: str) -> CorruptCheckpointError:
        file = self._found.storage.path(self._found.file(chunk_file(name, index)))
        return CorruptCheckpointError(f"array {name!r}, chunk {list(index)}: {file} {what}")

    def check(self, name: str, grid: ChunkGrid) -> Iterator[CorruptCheckpointError]:
        """Read all of an array; yield what is wrong with each of its chunks."""
        for index in grid.all_chunks():
            try:
                self.read(name, grid, grid.box(index))
            except CorruptCheckpointError as error:
                yield error
