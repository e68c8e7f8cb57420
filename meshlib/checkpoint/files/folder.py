"""The checkpoints in a folder: ``step-100``, each complete or not there.

A checkpoint is complete when the ``zarr.json`` at its top is there, which is written last. What has
none is what a job left that was killed while it wrote. A step that is saved again gets a folder of
its own, ``step-100.1``; when that is complete, the one before it goes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshlib.checkpoint.errors import CheckpointError, CorruptCheckpointError
from meshlib.checkpoint.files.storage import Storage, open_storage
from meshlib.checkpoint.files.zarr import DOCUMENT, ChunkGrid, grid_of, group_document
from transport.checks import to_whole_number
from transport.crc32c import crc32c

FORMAT = 1
_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, order=True)
class Entry:
    """One checkpoint of a folder; they sort from the oldest step to the newest."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"step-{self.step}" + (f".{self.generation}" if self.generation else "")

    @property
    def document(self) -> str:
        """The name of the file that makes it complete."""
        return f"{self.name}/{DOCUMENT}"


def entries_of(storage: Storage) -> tuple[list[Entry], list[Entry]]:
    """Return the complete checkpoints and the others, sorted; of a step the newest one only."""
    found = [
        Entry(int(match[1]), int(match[2] or 0))
        for match in map(_NAME.fullmatch, storage.folders())
        if match
    ]
    complete = [entry for entry in sorted(found) if storage.exists(entry.document)]
    by_step = {entry.step: entry for entry in complete}  # the last generation of each
    kept = list(by_step.values())
    return kept, sorted(set(found) - set(kept))


@dataclass(frozen=True)
class Description:
    """What the ``zarr.json`` at the top of a checkpoint says."""

    storage: Storage
    folder: str
    """Its name in the storage, "" where that is the checkpoint itself."""
    step: int
    metric: float | None
    tree: Any
    arrays: dict[str, dict[str, Any]]
    """The documents of the arrays, by name."""

    @property
    def path(self) -> str:
        """Where it lies."""
        return self.storage.path(self.folder) if self.folder else self.storage.location

    @cached_property
    def grids(self) -> dict[str, ChunkGrid]:
        """How the arrays are cut, by name. Raises CheckpointError for what is not known here."""
        return {name: grid_of(document, name) for name, document in self.arrays.items()}

    def file(self, name: str) -> str:
        """Return the name in the storage of one of its files."""
        return f"{self.folder}/{name}" if self.folder else name


def find(path: str | os.PathLike[str], step: int | None = None) -> Description:
    """Return the checkpoint at ``path``, or of a folder of checkpoints the newest one or ``step``.

    Raises CheckpointError where there is none, naming what there is.
    """
    storage = open_storage(path)
    if storage.exists(DOCUMENT):
        found = read_description(storage, "")
        if step is not None and found.step != step:
            raise CheckpointError(f"{path} is the checkpoint of step {found.step}, not {step}")
        return found
    complete, unfinished = entries_of(storage)
    chosen = [entry for entry in complete if step is None or entry.step == step]
    if chosen:
        return read_description(storage, chosen[-1].name)
    there = ", ".join(str(entry.step) for entry in complete)
    left = f" ({len(unfinished)} that were never finished)" if unfinished else ""
    if step is not None and complete:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {there}{left}")
    raise CheckpointError(f"{path} is no checkpoint and has none{left}")


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Return the step of the newest complete checkpoint in the folder ``path``, or None.

    Raises ImportError for a URL without fsspec.
    """
    complete, _ = entries_of(open_storage(path))
    return complete[-1].step if complete else None


def make_document(
    step: int, metric: float | None, tree: Any, arrays: Mapping[str, Any], groups: Sequence[str]
) -> bytes:
    """Return the ``zarr.json`` of a checkpoint, with those of its ``arrays`` and ``groups``."""
    own = {"format": FORMAT, "step": step, "metric": metric, "tree": tree}
    members = {**{name: group_document({}, None) for name in groups}, **arrays}
    document = group_document({"meshlib": own}, members)
    own["crc32c"] = crc32c(_canonical(document))
    return json.dumps(document).encode()


def _canonical(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def read_description(storage: Storage, folder: str) -> Description:
    """Return what the document of a complete checkpoint says; raise CorruptCheckpointError."""
    name = f"{folder}/{DOCUMENT}" if folder else DOCUMENT
    path = storage.path(name)
    try:
        document = json.loads(storage.read(name))
    except ValueError as error:
        raise CorruptCheckpointError(f"{path} is torn or was changed: {error}") from None
    try:
        own = document["attributes"]["meshlib"]
        members = document["consolidated_metadata"]["metadata"]
        version, step, tree = own["format"], own["step"], own["tree"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{path} is of a Zarr group, but not of a checkpoint") from None
    if own.pop("crc32c", None) != crc32c(_canonical(document)):
        raise CorruptCheckpointError(f"{path} was changed: its checksum is another one")
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}; expected {FORMAT}: another meshlib wrote it"
        )
    arrays = {key: one for key, one in members.items() if one["node_type"] == "array"}
    return Description(storage, folder, int(step), own.get("metric"), tree, arrays)


def check_step(step: Any) -> int:
    """Return ``step`` as an int; raise TypeError for no whole number, ValueError below 0."""
    number = to_whole_number(step, "step")
    if number < 0:
        raise ValueError(f"step is {number}; expected at least 0")
    return number
