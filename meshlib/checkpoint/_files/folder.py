"""The checkpoints in a folder: ``step-100``, each either complete or ignored.

A checkpoint is complete when the ``zarr.json`` at its top exists, which is written last. Without
it, the save is running, or its job was killed. The newest checkpoint is the one whose save began
last. When a run goes back to an earlier step, or saves a step again, the name gets a generation. So
``step-100.1`` is newer than ``step-300``, and ``step-200.1`` is newer than both.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from meshlib.checkpoint._errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint._files.locations import open_storage
from meshlib.checkpoint._files.storage import Storage
from meshlib.checkpoint._files.zarr import (
    DOCUMENT,
    ChunkGrid,
    check_name,
    grid_of,
    group_document,
)
from meshlib.checkpoint._nodes import check_node
from transport._checks import to_whole_number
from transport._crc32c import crc32c

FORMAT = 2
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,17}))?")
_LONGEST_DOCUMENT = 1 << 30

_PROGRAM = uuid.uuid4().hex


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint in a folder. Instances sort from the oldest to the newest.

    ``generation`` counts how often the job in this folder went back to an earlier step.
    """

    generation: int
    step: int

    @property
    def name(self) -> str:
        """The name of the checkpoint's folder."""
        return f"step-{self.step}" + (f".{self.generation}" if self.generation else "")

    @property
    def document(self) -> str:
        """The name of the file that makes the checkpoint complete."""
        return f"{self.name}/{DOCUMENT}"


class Entries(NamedTuple):
    """The entries of a folder, each kind from the oldest to the newest."""

    complete: list[StoredCheckpoint]
    """The newest complete checkpoint of each step."""
    replaced: list[StoredCheckpoint]
    """Older complete checkpoints of steps that were saved again."""
    unfinished: list[StoredCheckpoint]


def entries_of(storage: Storage) -> Entries:
    """Return the contents of a folder of checkpoints."""
    found = sorted(
        StoredCheckpoint(int(match[2] or 0), int(match[1]))
        for match in map(_NAME.fullmatch, storage.folders())
        if match
    )
    complete = [entry for entry in found if storage.exists(entry.document)]
    newest = {entry.step: entry for entry in complete}
    return Entries(
        sorted(newest.values()),
        [entry for entry in complete if newest[entry.step] != entry],
        sorted(set(found) - set(complete)),
    )


def _process() -> str:
    """Return the prefix of the names of this process's writers; a forked process has another."""
    return f"{_PROGRAM}-{os.getpid()}-"


def new_owner() -> str:
    """Return a unique name for a writer."""
    return f"{_process()}{uuid.uuid4().hex}"


def claim_entry(storage: Storage, step: int, owner: str) -> StoredCheckpoint:
    """Claim the folder of a new checkpoint, which is newer than all complete ones; return it."""
    complete = entries_of(storage).complete
    newest = complete[-1] if complete else StoredCheckpoint(0, -1)
    entry = StoredCheckpoint(newest.generation + (step <= newest.step), step)
    while not storage.claim(entry.name, owner):
        entry = StoredCheckpoint(entry.generation + 1, step)
    return entry


def sweep(storage: Storage, unfinished: Iterable[StoredCheckpoint]) -> None:
    """Remove unfinished checkpoints, except those that this process is writing."""
    for entry in unfinished:
        if not any(owner.startswith(_process()) for owner in storage.claims(entry.name)):
            storage.remove_unfinished(entry.name)


@dataclass(frozen=True)
class Description:
    """The content of the ``zarr.json`` at the top of a checkpoint."""

    storage: Storage
    """The checkpoint's folder."""
    step: int
    metric: float | None
    tree: Any
    arrays: dict[str, dict[str, Any]]
    """The documents of the arrays, by name."""
    checksums: dict[str, list[int]]
    """The CRC-32C of each chunk of an array, in C order, by the array's name."""

    @property
    def path(self) -> str:
        """The checkpoint's path or URL."""
        return self.storage.location

    @cached_property
    def grids(self) -> dict[str, ChunkGrid]:
        """The arrays' chunk grids, by name. Raises CheckpointError for an invalid document."""
        grids = {name: grid_of(document, name) for name, document in self.arrays.items()}
        for name, grid in grids.items():
            if len(self.checksums[name]) != grid.chunk_count:
                raise CheckpointError(
                    f"array {name!r} has {grid.chunk_count} chunks, but checksums of"
                    f" {len(self.checksums[name])}"
                )
        return grids

    def checksum(self, name: str, index: Sequence[int]) -> int:
        """Return the CRC-32C of a chunk's elements."""
        return self.checksums[name][self.grids[name].number_of(index)]


def find(path: str | os.PathLike[str], step: int | None = None) -> Description:
    """Return the checkpoint at ``path``, or the newest (or that of ``step``) in a folder of them.

    Raises CheckpointError, which lists the existing steps, if there is none.
    """
    storage = open_storage(path)
    if storage.exists(DOCUMENT):
        found = read_description(storage)
        if step is not None and found.step != step:
            raise CheckpointError(f"{path} is the checkpoint of step {found.step}, not {step}")
        return found
    complete, _, unfinished = entries_of(storage)
    chosen = [entry for entry in complete if step is None or entry.step == step]
    if chosen:
        return read_entry(storage, chosen[-1])
    there = ", ".join(str(entry.step) for entry in complete)
    left = f" ({len(unfinished)} that were never finished)" if unfinished else ""
    if step is not None and complete:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {there}{left}")
    raise CheckpointError(f"{path} is not a checkpoint and contains none{left}")


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Return the step of the newest complete checkpoint in the folder ``path``, or None.

    The newest is the checkpoint whose save began last, even if another has a higher step. Raises
    ImportError for a URL without fsspec.
    """
    complete = entries_of(open_storage(path)).complete
    return complete[-1].step if complete else None


def make_document(
    step: int,
    metric: float | None,
    tree: Any,
    arrays: Mapping[str, Any],
    groups: Sequence[str],
    checksums: Mapping[str, Sequence[int]],
) -> bytes:
    """Return the ``zarr.json`` of a checkpoint, with the documents of its arrays and groups."""
    own = {
        "format": FORMAT,
        "step": step,
        "metric": metric,
        "tree": tree,
        "checksums": dict(checksums),
    }
    members = {**{name: group_document({}, None) for name in groups}, **arrays}
    document = group_document({"meshlib": own}, members)
    own["crc32c"] = crc32c(_canonical(document))
    return json.dumps(document).encode()


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def read_entry(storage: Storage, entry: StoredCheckpoint) -> Description:
    """Read the description of the checkpoint ``entry`` of a folder with ``read_description``."""
    found = read_description(storage.below(entry.name))
    if found.step != entry.step:
        raise CorruptCheckpointError(f"{found.path} is the checkpoint of step {found.step}")
    return found


def read_description(storage: Storage) -> Description:
    """Read the description of a complete checkpoint from its document.

    Raises CorruptCheckpointError if the document is torn or was changed, CheckpointError if it is
    not that of a checkpoint.
    """
    path = storage.path(DOCUMENT)
    if storage.size(DOCUMENT) > _LONGEST_DOCUMENT:
        raise CheckpointError(f"{path} has {storage.size(DOCUMENT)} bytes; expected 1 GiB at most")
    try:
        document = json.loads(storage.read(DOCUMENT))
        own = document["attributes"]["meshlib"]
        members = document["consolidated_metadata"]["metadata"]
        stored, found = own.pop("crc32c", None), crc32c(_canonical(document))
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is a Zarr group's, but not a checkpoint's") from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is torn or was changed: {error}") from None
    if stored != found:
        raise CorruptCheckpointError(f"{path} was changed: its checksum does not match")
    if own.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {own.get('format')!r}; expected {FORMAT}: another version of"
            " meshlib wrote it"
        )
    try:
        return _described(storage, own, members)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} has invalid contents: {error}") from None


def _described(storage: Storage, own: Mapping[str, Any], members: Mapping[str, Any]) -> Description:
    arrays = {name: one for name, one in members.items() if one["node_type"] == "array"}
    checksums = own["checksums"]
    for name in arrays:
        check_name(name)
        if not isinstance(checksums[name], list):
            raise ValueError(f"the checksums of array {name!r} are {checksums[name]!r}")
    metric = own["metric"]
    check_node(own["tree"], set(arrays))
    return Description(
        storage,
        check_step(own["step"]),
        None if metric is None else float(metric),
        own["tree"],
        arrays,
        checksums,
    )


def check_step(step: Any) -> int:
    """Return ``step`` as an int; raise TypeError unless it is an integer, ValueError below 0."""
    number = to_whole_number(step, "step")
    if number < 0:
        raise ValueError(f"step is {number}; expected at least 0")
    return number
