"""Saving: agree on the tree, write one's chunks, and make it all be there at once.

1. Each rank flattens its state; digests are compared, and where they differ the first difference
   is named. The first rank says which folder it will be.
2. Each rank writes the chunks that are its own (``meshlib.checkpoint.files.layout``).
3. When all have told that theirs are on the disk, the first rank writes the ``zarr.json`` at the
   top, under another name, and renames it: that is when the checkpoint is there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from meshlib.checkpoint.agreement import Party, first_difference
from meshlib.checkpoint.errors import CheckpointError
from meshlib.checkpoint.files.folder import Entry, check_step, entries_of, make_document
from meshlib.checkpoint.files.storage import Storage
from meshlib.checkpoint.files.zarr import DOCUMENT, groups_above
from meshlib.checkpoint.pieces import Kept, Piece, Room, Shares, detach
from meshlib.checkpoint.tree import array_of, encode, leaves_of, shown
from transport.errors import DistError


class Save:
    """One checkpoint on its way. Made and written by all ranks of ``party`` together.

    Raises what ``meshlib.checkpoint.save`` says. One that is to be ``detached`` tells the others
    nothing before ``write``, unless there are arrays that have to be laid out anew, and all that is
    wrong is raised by that. ``known`` are the ``shares`` of an earlier one, which hold for this if
    its arrays are the same but for their values.
    """

    _storage: Storage
    _tree: Any
    shares: Shares | None = None
    """Which chunks this rank writes; None as long as that cannot be said."""

    def __init__(
        self,
        party: Party,
        storage: Callable[[], Storage],
        state: Any,
        step: int,
        metric: float | None,
        *,
        detached: bool = False,
        known: Shares | None = None,
    ) -> None:
        self._party = party
        self._step, self._metric = -1, metric
        self._entry: Entry | None = None
        # What is wrong here is raised on all ranks when they next tell each other something.
        self._wrong: Exception | None = None
        self._failed: Exception | None = None
        self._pieces: list[Piece] = []
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
            except Exception as error:  # noqa: BLE001 (raised by ``write``, as on ranks without such)
                self._failed = error
                return
        try:
            if self.shares is not None:
                self._pieces = self.shares.pieces(arrays)
        except DistError:
            raise
        except Exception as error:  # noqa: BLE001
            self._wrong = self._wrong or error

    def detach(self, room: Room | None) -> Room | None:
        """Copy what is to be written, so that the state may change; return the memory of it.

        That is ``room`` if it is large enough. What goes wrong ``write`` raises.
        """
        before = self._wrong
        self._wrong = before or CheckpointError("the copy of the state was broken off")
        try:
            room = detach(self._pieces, room)
            self._wrong = before
        except Exception as error:  # noqa: BLE001
            self._wrong = before or error
        return room

    @property
    def entry(self) -> Entry:
        """Which checkpoint it will be, once that is agreed."""
        assert self._entry is not None
        return self._entry

    # ------------------------------------------------------------------ agreeing

    def _flatten(
        self, storage: Callable[[], Storage], state: Any, step: int, known: Shares | None
    ) -> dict[str, Any]:
        """Take the state apart; return its arrays by name."""
        self._storage = storage()
        self._step, self._metric = check_step(step), check_metric(self._metric)
        self._tree, arrays = encode(state)
        kept = tuple(Kept.of(name, leaf) for name, leaf in arrays.items())
        same = known is not None and known.arrays == kept
        self.shares = known if same else Shares(self._party, kept)
        return arrays

    def _agree(self) -> None:
        party = self._party

        def tell() -> tuple[str, Entry | None]:
            if self._wrong is not None:
                raise self._wrong
            digest = sha256(json.dumps(self._lines()).encode()).hexdigest()
            entry = self._new_entry() if party.is_first else None
            return f"{digest} step {self._step} metric {self._metric}", entry

        told = party.gather(tell)
        self._entry = told[0][1]
        if any(digest != told[0][0] for digest, _ in told):
            own = {"'s step": str(self._step), "'s metric": str(self._metric), **self._lines()}
            difference = first_difference(party.ranks, party.gather(lambda: own))
            raise CheckpointError(
                f"{difference}; expected the same tree on all ranks (what differs by rank is a"
                " DArray, or not in it)"
            )

    def _lines(self) -> dict[str, str]:
        """Return what must be the same on all ranks: a line for each leaf, by its path."""
        assert self.shares is not None
        lines: dict[str, str] = {}
        for path, leaf in leaves_of(self._tree):
            name = array_of(leaf)
            lines[shown(path)] = json.dumps(leaf) if name is None else self.shares.lines[name]
        return lines

    def _new_entry(self) -> Entry:
        """Return a folder that is not there yet, after removing what others left unfinished."""
        complete, others = entries_of(self._storage)
        used = [e.generation for e in (*complete, *others) if e.step == self._step]
        for entry in others:
            self._storage.remove(entry.name, DOCUMENT)
        return Entry(self._step, max(used, default=-1) + 1)

    # ------------------------------------------------------------------ writing

    def write(self, committed: Callable[[Storage], None] | None = None) -> str:
        """Write this rank's chunks; return the path when the checkpoint is complete.

        The first rank then calls ``committed``, before the others go on.
        """
        if self._failed is not None:
            raise self._failed
        if self._entry is None:
            self._agree()
        storage, folder, shares = self._storage, self.entry.name, self.shares
        assert shares is not None

        def write_own() -> tuple[str, str | None]:
            if self._wrong is not None:
                raise self._wrong
            last = shares.write(self._pieces, storage, folder, first=self._party.is_first)
            storage.sync()
            return storage.place, last

        def commit() -> None:
            self._check_seen(written)
            groups = groups_above(list(shares.documents))
            document = make_document(self._step, self._metric, self._tree, shares.documents, groups)
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


def check_metric(metric: Any) -> float | None:
    """Return ``metric`` as a float, None if there is none; raise ValueError unless finite."""
    if metric is None:
        return None
    value = float(metric)
    if not math.isfinite(value):
        raise ValueError(f"metric is {value}; expected a finite number")
    return value
