"""``meshlib checkpoint ls|show|verify|reshard|diff``: inspects and converts checkpoints."""

from __future__ import annotations

import argparse
import fnmatch
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshlib._command_line import OneLineParser, print_result
from meshlib._mesh.config import MeshConfig
from meshlib._plain_text import binary_size, columns
from meshlib.checkpoint._errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint._files.folder import (
    Description,
    StoredCheckpoint,
    claim_entry,
    entries_of,
    find,
    make_document,
    new_owner,
    read_entry,
)
from meshlib.checkpoint._files.layout import aligned, chunked
from meshlib.checkpoint._files.locations import open_storage
from meshlib.checkpoint._files.storage import Storage
from meshlib.checkpoint._files.zarr import (
    ChunkGrid,
    array_document,
    group_document,
    groups_above,
)
from meshlib.checkpoint._leaves import Host
from meshlib.checkpoint._loading import ChunkReader
from meshlib.checkpoint._nodes import array_of, decode, leaves_of, shown
from meshlib.checkpoint._pieces import ChunkWrite, write_document
from meshlib.sharding._sharding import Sharding
from meshlib.sharding._spec import parse_spec

_WIDTH = 72


class _Differs(Exception):
    """A difference or damage: its text is printed, and the exit code is 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return 0, 1 if data is damaged or differs, or 2."""
    parser = OneLineParser(
        prog="meshlib checkpoint",
        description="Inspect and check checkpoints, and change their chunks.",
    )
    words = parser.add_subparsers(dest="word", required=True, metavar="ls|show|verify|reshard|diff")
    made = {
        name: words.add_parser(name, help=text, description=text, prog=f"{parser.prog} {name}")
        for name, (_, text) in _WORDS.items()
    }
    for name, one in made.items():
        one.add_argument("path", help="a checkpoint or a folder of them, as a path or URL")
        if name != "ls":
            one.add_argument("--step", type=int, help="the step in a folder (default: the newest)")
    made["reshard"].add_argument("out", help="the folder that gets the new checkpoint")
    made["reshard"].add_argument("--mesh", required=True, metavar="DIMS", help="such as dp=2,tp=2")
    made["reshard"].add_argument(
        "--spec",
        action="append",
        default=[],
        metavar="ARRAYS=SPEC",
        help="chunks like the shards of a spec, for arrays whose names match: 'model/*=dp, tp'"
        " (repeatable; the first match counts; an array of fewer dims uses the first entries)",
    )
    made["diff"].add_argument("other", help="another checkpoint, or a folder of them")
    made["diff"].add_argument("--other-step", type=int, metavar="STEP")
    given = parser.parse_args(argv)
    failed: list[bool] = []

    def make() -> str:
        try:
            return _WORDS[given.word][0](given)
        except _Differs as difference:
            failed.append(True)
            return str(difference)

    return print_result(f"{parser.prog} {given.word}", make) or int(bool(failed))


# ---------------------------------------------------------------------------- ls


def _ls(given: argparse.Namespace) -> str:
    storage = open_storage(given.path)
    entries = entries_of(storage)
    if not any(entries):
        raise CheckpointError(f"{given.path} has no checkpoints")
    rows = [["step", "arrays", "size", "metric", "folder"]]
    notes = dict.fromkeys(entries.replaced, "replaced")
    notes |= dict.fromkeys(entries.unfinished, "never finished")
    for entry in sorted((*entries.complete, *notes)):
        rows.append(
            [str(entry.step), "", "", "", f"{entry.name} ({notes[entry]})"]
            if entry in notes
            else _row(read_entry(storage, entry), entry)
        )
    return "\n".join([*columns(rows), ""])


def _row(found: Description, entry: StoredCheckpoint) -> list[str]:
    total = sum(grid.nbytes for grid in found.grids.values())
    metric = "" if found.metric is None else f"{found.metric:g}"
    return [str(entry.step), str(len(found.arrays)), binary_size(total), metric, entry.name]


# ---------------------------------------------------------------------------- show


def _show(given: argparse.Namespace) -> str:
    found = find(given.path, given.step)
    total = sum(grid.nbytes for grid in found.grids.values())
    rows: list[list[str]] = []
    for path, leaf in leaves_of(found.tree):
        name = array_of(leaf)
        if name is None:
            text = repr(decode(leaf, str))
            rows.append([shown(path), text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"])
            continue
        grid = found.grids[name]
        chunks = math.prod(grid.counts)
        cut = f"{chunks} chunks of {list(grid.chunk_shape)}" if chunks > 1 else "1 chunk"
        kind = f"{grid.dtype.name}{list(grid.shape)}"
        rows.append(
            [shown(path), f"{kind}  {binary_size(grid.nbytes)}  {cut if chunks else 'empty'}"]
        )
    metric = "" if found.metric is None else f", metric {found.metric:g}"
    head = (
        f"{found.path}: step {found.step}{metric}, {len(found.arrays)} arrays, {binary_size(total)}"
    )
    return "\n".join([head, *columns(rows), ""])


# ---------------------------------------------------------------------------- verify


def _verify(given: argparse.Namespace) -> str:
    found = find(given.path, given.step)
    reader = ChunkReader(found)
    wrong: list[CorruptCheckpointError] = []
    for name in found.grids:
        wrong += reader.check(name)
    size = binary_size(reader.bytes_read)
    text = f"{found.path}: {len(found.arrays)} arrays, {_chunks(found.grids)} chunks, {size}"
    if wrong:
        lines = "".join(f"{error}\n" for error in wrong)
        raise _Differs(f"{lines}{text}: {len(wrong)} DAMAGED\n")
    return f"{text}: no damage\n"


# ---------------------------------------------------------------------------- reshard


def _reshard(given: argparse.Namespace) -> str:
    found = find(given.path, given.step)
    config = MeshConfig.from_string(given.mesh)
    if config.world_size is None:
        raise ValueError(f"--mesh {given.mesh} has a degree of -1; expected all degrees")
    mesh = config.mesh_for(config.world_size)
    rules: list[tuple[str, str]] = []
    for text in given.spec:
        pattern, equals, spec = text.partition("=")
        if not equals:
            raise ValueError(f"--spec {text!r} has no '='; expected such as 'model/*=dp, tp'")
        rules.append((pattern, spec))

    def grid_for(name: str, grid: ChunkGrid) -> ChunkGrid:
        for pattern, spec in rules:
            if fnmatch.fnmatchcase(name, pattern):
                sharding = Sharding(mesh, *parse_spec(spec))
                dims = sharding.dims[: len(grid.shape)]
                sharding = aligned(Sharding.of_positions(mesh, dims), grid.shape)
                return chunked(grid.shape, grid.dtype, sharding, sharding.replica_count)
        return chunked(grid.shape, grid.dtype, None, 1)

    new = {name: grid_for(name, grid) for name, grid in found.grids.items()}
    path = _rewrite(found, open_storage(given.out), new)
    chunks = f"{_chunks(new)} chunks were {_chunks(found.grids)}"
    return f"{path}: {len(new)} arrays, {chunks}\n"


def _chunks(grids: Mapping[str, ChunkGrid]) -> int:
    return sum(math.prod(grid.counts) for grid in grids.values())


def _rewrite(found: Description, storage: Storage, grids: Mapping[str, ChunkGrid]) -> str:
    """Write ``found`` into another storage with the chunks of ``grids``; return the new path.

    Holds one chunk in memory at a time. Raises FileExistsError when the storage has the step
    already, CorruptCheckpointError for damaged chunks.
    """
    taken = [entry for some in entries_of(storage) for entry in some if entry.step == found.step]
    if taken:
        raise FileExistsError(17, "a checkpoint of this step exists", storage.path(taken[0].name))
    owner = new_owner()
    entry = claim_entry(storage, found.step, owner)
    reader = ChunkReader(found)
    checksums: dict[str, list[int]] = {name: [] for name in grids}
    for name, grid in grids.items():
        for index in grid.all_chunks():
            piece = ChunkWrite(name, index, grid, reader.read(name, grid.box(index)))
            checksums[name].append(piece.write(storage, entry.name))
    documents = {name: array_document(grid, name) for name, grid in grids.items()}
    groups = groups_above(list(documents))
    below = {**documents, **{group: group_document({}, None) for group in groups}}
    for name, document in below.items():
        write_document(storage, f"{entry.name}/{name}", document)
    top = make_document(found.step, found.metric, found.tree, documents, groups, checksums)
    storage.publish(entry.name, owner, top)
    return storage.path(entry.name)


# ---------------------------------------------------------------------------- diff


def _diff(given: argparse.Namespace) -> str:
    one, other = find(given.path, given.step), find(given.other, given.other_step)
    readers = ChunkReader(one), ChunkReader(other)
    grids = one.grids, other.grids
    leaves = dict(leaves_of(one.tree)), dict(leaves_of(other.tree))
    rows: list[list[str]] = []
    for path in leaves[0] | leaves[1]:
        if path not in leaves[0] or path not in leaves[1]:
            rows.append([shown(path), f"only in {(one if path in leaves[0] else other).path}"])
            continue
        names = [array_of(side[path]) for side in leaves]
        if None in names:
            texts = [
                "an array" if n else repr(decode(s[path], str))
                for n, s in zip(names, leaves, strict=True)
            ]
            # Compare as text, so that nan equals nan.
            if texts[0] != texts[1]:
                rows.append([shown(path), f"{texts[0]} and {texts[1]}"])
            continue
        sides = [(r, str(n), g[str(n)]) for r, n, g in zip(readers, names, grids, strict=True)]
        what = _array_difference(*sides)
        if what:
            rows.append([shown(path), what])
    head = f"{one.path} and {other.path}"
    if rows:
        head += f" differ in {len(rows)} of {len(leaves[0])} leaves"
        raise _Differs("\n".join([head, *columns(rows), ""]))
    return f"{head} are equal: {len(leaves[0])} leaves\n"


_Side = tuple[ChunkReader, str, ChunkGrid]


def _array_difference(one: _Side, other: _Side) -> str | None:
    """Compare two arrays chunk by chunk; return the difference in words, or None."""
    kinds = [f"{grid.dtype.name}{list(grid.shape)}" for _, _, grid in (one, other)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    count, largest = 0, 0.0
    for index in one[2].all_chunks():
        box = one[2].box(index)
        a, b = (reader.read(name, box) for reader, name, _ in (one, other))
        changed = a.view(np.uint8) != b.view(np.uint8) if a.ndim else np.array(a != b)
        if not changed.any():
            continue
        differing = _unequal(a, b)
        count += int(differing.sum())
        if differing.any():
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            largest = max(largest, float(np.abs(a.astype(wide) - b.astype(wide))[differing].max()))
    if not count:
        return None
    size = math.prod(one[2].shape)
    return f"{count} of {size} elements differ, by {largest:.3g} at most"


def _unequal(a: Host, b: Host) -> Any:
    if a.dtype.kind in "fcV":
        nan = np.isnan(a.astype(np.complex128)) & np.isnan(b.astype(np.complex128))
        return (a != b) & ~nan
    return a != b


_WORDS = {
    "ls": (_ls, "list the checkpoints of a folder"),
    "show": (_show, "print the tree of a checkpoint: shapes, dtypes, chunks and values"),
    "verify": (_verify, "read all of a checkpoint and compare checksums"),
    "reshard": (_reshard, "write a copy of a checkpoint, with chunks along other shards"),
    "diff": (_diff, "list the differences of two checkpoints"),
}


if __name__ == "__main__":
    sys.exit(main())
