"""A checkpoint written anew by one process in other chunks, one of them in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

from meshlib.checkpoint.files.folder import Description, Entry, entries_of, make_document
from meshlib.checkpoint.files.storage import Storage
from meshlib.checkpoint.files.zarr import (
    ChunkGrid,
    array_document,
    grid_of,
    group_document,
    groups_above,
)
from meshlib.checkpoint.loading import ChunkReader
from meshlib.checkpoint.pieces import Piece, write_document


def rewrite(
    found: Description, storage: Storage, grid_for: Callable[[str, ChunkGrid], ChunkGrid]
) -> tuple[str, tuple[int, int]]:
    """Write ``found`` into another storage, each array in the chunks of ``grid_for(name, grid)``.

    Returns the new path, and how many chunks there are now and were before. Raises FileExistsError
    when the storage has the step already, CorruptCheckpointError for what is damaged.
    """
    complete, others = entries_of(storage)
    used = {entry.step for entry in (*complete, *others)}
    if found.step in used:
        name = Entry(found.step, 0).name
        raise FileExistsError(17, "there is one of this step already", storage.path(name))
    entry = Entry(found.step, 0)
    reader = ChunkReader(found)
    documents: dict[str, dict[str, object]] = {}
    now = before = 0
    for name, document in found.arrays.items():
        old = grid_of(document, name)
        new = grid_for(name, old)
        documents[name] = array_document(new, name)
        now += math.prod(new.counts)
        before += math.prod(old.counts)
        for index in new.all_chunks():
            piece = Piece(name, index, new, reader.read(name, old, new.box(index)))
            piece.write(storage, entry.name)
    groups = groups_above(list(documents))
    below = {**documents, **{group: group_document({}, None) for group in groups}}
    for name, document in below.items():
        write_document(storage, f"{entry.name}/{name}", document)
    top = make_document(found.step, found.metric, found.tree, documents, groups)
    storage.publish(entry.document, top)
    return storage.path(entry.name), (now, before)
