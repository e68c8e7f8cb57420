"""The choice of the checkpoints to keep in a folder, and the removal of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshlib.checkpoint._errors import CheckpointError
from meshlib.checkpoint._files.folder import StoredCheckpoint, entries_of, read_entry
from meshlib.checkpoint._files.storage import Storage
from transport._checks import to_whole_number


@dataclass(frozen=True)
class Keeping:
    """A rule that keeps the ``last`` newest checkpoints and the ``best`` ones by metric.

    If both numbers are None, all are kept. The newest checkpoint is always kept; of each step only
    the newest is. Raises ValueError for counts below 1 or another ``better``, TypeError for a value
    that is not an integer.
    """

    last: int | None = None
    best: int | None = None
    better: Literal["lower", "higher"] = "lower"

    def __post_init__(self) -> None:
        for name, count in (("keep_last", self.last), ("keep_best", self.best)):
            if count is not None and to_whole_number(count, name) < 1:
                raise ValueError(f"{name} is {count}; expected at least 1, or None for all")
        if self.better not in ("lower", "higher"):
            raise ValueError(f"better is {self.better!r}; expected 'lower' or 'higher'")

    def clean(self, storage: Storage, written: StoredCheckpoint) -> None:
        """Remove the checkpoints that the rule does not keep; always keep ``written``."""
        complete, replaced, _ = entries_of(storage)
        kept = {written, *self._kept(storage, complete)}
        for entry in (*replaced, *complete):
            if entry not in kept:
                storage.remove(entry.name)

    def _kept(self, storage: Storage, complete: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
        if self.last is None and self.best is None:
            return complete
        kept = complete[-(self.last or 1) :]
        if self.best is not None:
            # Read again each time: another writer may have replaced a step.
            metrics = {entry: _metric(storage, entry) for entry in complete}
            measured = {entry: metric for entry, metric in metrics.items() if metric is not None}
            best = sorted(measured, key=measured.__getitem__, reverse=self.better == "higher")
            kept += best[: self.best]
        return kept


def _metric(storage: Storage, entry: StoredCheckpoint) -> float | None:
    try:
        return read_entry(storage, entry).metric
    except (CheckpointError, FileNotFoundError):
        return None
