"""Saving: agree on the tree, write chunks, publish the checkpoint atomically.

1. Each rank flattens its state. The ranks compare digests; if these differ, the error names the
   first difference. The first rank claims a folder.
2. Each rank writes its own chunks (``meshlib.checkpoint._files.layout``).
3. Each rank reports its chunks' checksums once they are on the disk. Then the first rank writes the
   ``zarr.json`` at the top under another name and renames it, which publishes the checkpoint. At
   the end it removes the unfinished saves that it found at the beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from typing import Any, NamedTuple

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.folder import (
    StoredCheckpoint,
    check_step,
    claim_entry,
    entries_of,
    make_document,
    new_owner,
    sweep,
)
from meshlib.checkpoint._files.keeping import Keeping
from meshlib.checkpoint._files.storage import Storage
from meshlib.checkpoint._files.zarr import chunk_file, groups_above
from meshlib.checkpoint._nodes import array_of, leaves_of, shown
from meshlib.checkpoint._participants import Participants, first_difference
from meshlib.checkpoint._pieces import ArrayEntry, Checksums, ChunkShares, ChunkWrite, Room, detach
from meshlib.checkpoint._tree import encode
from transport._errors import DistError


class _Written(NamedTuple):
    """A rank's report: the place of its storage, and the checksums of its chunks."""

    place: str
    checksums: Checksums


class Save:
    """A save of one checkpoint, made and written by all ranks of ``participants`` together.

    Raises the errors of ``meshlib.checkpoint.save``. A ``detached`` save communicates only in
    ``write``, which also raises its errors, unless arrays must be redistributed first. The
    ``shares`` of an earlier save, passed as ``known``, are reused if only the arrays' values
    differ.
    """

    _storage: Storage
    _tree: Any
    _entry: StoredCheckpoint | None = None
    shares: ChunkShares | None = None
    """The chunks that this rank writes; None until the state is flattened."""

    def __init__(
        self,
        participants: Participants,
        storage: Callable[[], Storage],
        state: Any,
        step: int,
        metric: float | None,
        *,
        detached: bool = False,
        known: ChunkShares | None = None,
    ) -> None:
        self._participants = participants
        self._step, self._metric = -1, metric
        self._owner = new_owner()
        self._unfinished: list[StoredCheckpoint] = []
        # An error here is raised on all ranks at their next exchange.
        self._wrong: Exception | None = None
        self._failed: Exception | None = None
        self._pieces: list[ChunkWrite] = []
        arrays: dict[str, Any] = {}
        try:
            arrays = self._flatten(storage, state, step, known)
        except Exception as error:  # noqa: BLE001
            self._wrong = error
        if not detached:
            self._agree()
        elif self.shares is not None and self.shares.moved:
            try:
                self._agree()
            except Exception as error:  # noqa: BLE001 (``write`` raises it, as on the other ranks)
                self._failed = error
                return
        try:
            if self.shares is not None:
                self._pieces = self.shares.pieces(arrays)
        except (DistError, KeyboardInterrupt) as error:
            self._give_up(error)
            raise
        except Exception as error:  # noqa: BLE001
            self._wrong = self._wrong or error

    def detach(self, room: Room | None) -> Room | None:
        """Copy the data to write, so that the state may change; return the memory of the copy.

        That is ``room`` if it is large enough. ``write`` raises any error of the copy.
        """
        before = self._wrong
        self._wrong = before or CheckpointError("the copy of the state was interrupted")
        try:
            room = detach(self._pieces, room)
            self._wrong = before
        except Exception as error:  # noqa: BLE001
            self._wrong = before or error
        return room

    @property
    def entry(self) -> StoredCheckpoint:
        """The checkpoint's entry in the folder, once the ranks have agreed on it."""
        assert self._entry is not None
        return self._entry

    # ------------------------------------------------------------------ agreeing

    def _flatten(
        self, storage: Callable[[], Storage], state: Any, step: int, known: ChunkShares | None
    ) -> dict[str, Any]:
        """Encode the state's tree; return its arrays by name."""
        self._storage = storage()
        self._step, self._metric = check_step(step), check_metric(self._metric)
        self._tree, arrays = encode(state)
        kept = tuple(ArrayEntry.of(name, leaf) for name, leaf in arrays.items())
        same = known is not None and known.arrays == kept
        self.shares = known if same else ChunkShares(self._participants, kept)
        return arrays

    def _agree(self) -> None:
        participants = self._participants

        def answer() -> tuple[str, StoredCheckpoint | None]:
            if self._wrong is not None:
                raise self._wrong
            digest = sha256(json.dumps(self._lines()).encode()).hexdigest()
            if participants.is_first:
                self._unfinished = entries_of(self._storage).unfinished
                self._entry = claim_entry(self._storage, self._step, self._owner)
            return f"{digest} step {self._step} metric {self._metric}", self._entry

        with self._or_give_up():
            answers = participants.gather(answer)
            self._entry = answers[0][1]
            if any(digest != answers[0][0] for digest, _ in answers):
                own = {"'s step": str(self._step), "'s metric": str(self._metric), **self._lines()}
                difference = first_difference(participants.ranks, participants.gather(lambda: own))
                raise CheckpointError(
                    f"{difference}; expected equal trees on all ranks (use a DArray for values that"
                    " differ by rank)"
                )

    def _lines(self) -> dict[str, str]:
        """Return a line for each leaf, by its path; all ranks must have equal lines."""
        assert self.shares is not None
        lines: dict[str, str] = {}
        for path, leaf in leaves_of(self._tree):
            name = array_of(leaf)
            lines[shown(path)] = json.dumps(leaf) if name is None else self.shares.lines[name]
        return lines

    @contextmanager
    def _or_give_up(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:  # including an interrupted wait
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """On the first rank, remove its files and the leftovers of other jobs."""
        if self._entry is None or not self._participants.is_first:
            return
        entry, storage = self._entry, self._storage
        if self._owner not in storage.claims(entry.name):
            return  # published, or removed by another job
        if isinstance(error, Exception) and not isinstance(error, DistError):
            # All ranks have reported, so none is still writing.
            storage.remove_unfinished(entry.name)
            sweep(storage, self._unfinished)
        else:
            # A rank may still be writing. The next save removes the folder without a claim.
            storage.withdraw(entry.name)

    # ------------------------------------------------------------------ writing

    def write(self, keeping: Keeping) -> str:
        """Write this rank's chunks; return the path when the checkpoint is complete.

        Before the others continue, the first rank removes checkpoints as ``keeping`` demands.
        """
        if self._failed is not None:
            raise self._failed
        if self._entry is None:
            self._agree()
        storage, entry, shares = self._storage, self.entry, self.shares
        assert shares is not None

        def write_own() -> _Written:
            if self._wrong is not None:
                raise self._wrong
            first = self._participants.is_first
            try:
                checksums = shares.write(self._pieces, storage, entry.name, first=first)
                storage.sync()
            except FileNotFoundError:
                raise storage.taken(entry.name) from None
            return _Written(storage.place, checksums)

        def commit() -> None:
            self._check_visible(written)
            groups = groups_above(list(shares.documents))
            checksums = shares.in_order(one.checksums for one in written)
            document = make_document(
                self._step, self._metric, self._tree, shares.documents, groups, checksums
            )
            try:
                storage.publish(entry.name, self._owner, document)
            except OSError:
                # The document may be complete, but not durable.
                storage.remove(entry.name)
                raise
            keeping.clean(storage, entry)
            sweep(storage, self._unfinished)

        with self._or_give_up(), ExitStack() as undo:
            undo.callback(storage.forget)
            written = self._participants.gather(write_own)
            self._participants.of_first(commit)
            undo.pop_all()
        return storage.path(entry.name)

    def _check_visible(self, written: Sequence[_Written]) -> None:
        """Raise CheckpointError unless the first rank sees the files that the others have written.

        Checks one file of each host. A path on the hosts' own disks exists everywhere, but each
        disk would hold only a part of the checkpoint.
        """
        ranks, storage = self._participants.ranks, self._storage
        files: dict[str, tuple[int, str]] = {}
        for rank, (place, checksums) in zip(ranks, written, strict=True):
            for array, chunks in checksums.items():
                file = f"{self.entry.name}/{chunk_file(array, next(iter(chunks)))}"
                files[place] = rank, file
        for rank, file in files.values():
            if not storage.exists(file):
                raise CheckpointError(
                    f"rank {rank} has written {file}, but rank {ranks[0]} does not find"
                    f" {storage.path(file)}; expected a path to one folder that all ranks share"
                )


def check_metric(metric: Any) -> float | None:
    """Return ``metric`` as a float, None if there is none; raise ValueError unless finite."""
    if metric is None:
        return None
    value = float(metric)
    if not math.isfinite(value):
        raise ValueError(f"metric is {value}; expected a finite number")
    return value
