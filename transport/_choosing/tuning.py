"""Tables of thresholds and costs, measured by ``meshlib tune`` or shipped with meshlib."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transport import _environment as environment
from transport._choosing.choice import DEFAULT, Thresholds
from transport._choosing.cost import Cost
from transport._store.base import Store

FORMAT = 1
_SHIPPED = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True, slots=True)
class TransportTuning:
    """The measurements of one transport: its cost, and thresholds by ascending number of ranks.

    ``cost`` is None if other transports' costs apply. Thresholds missing in a table are those of
    ``DEFAULT``.
    """

    cost: Cost | None
    thresholds: tuple[tuple[int, Thresholds], ...] = ()

    @classmethod
    def of(
        cls, thresholds: dict[str, dict[str, int]], cost: dict[str, float] | None = None
    ) -> TransportTuning:
        """Return the tuning in JSON objects; the keys of ``thresholds`` are numbers of ranks."""
        tables = {int(ranks): Thresholds(**table) for ranks, table in thresholds.items()}
        if tables and min(tables) < 1:
            raise ValueError(f"thresholds are for 1 or more ranks, got {min(tables)}")
        for name, value in (cost or {}).items():
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}, expected a positive number")
        return cls(None if cost is None else Cost(**cost), tuple(sorted(tables.items())))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Measurements by transport name; ``source`` describes how, when and where they were made."""

    source: str
    transports: Mapping[str, TransportTuning] = field(default_factory=dict[str, TransportTuning])

    def thresholds(self, transport: str, size: int) -> Thresholds:
        """Return the thresholds of the largest measured number of ranks up to ``size``, else of the
        smallest measured number.
        """
        found = self.transports.get(transport)
        if found is None or not found.thresholds:
            return DEFAULT
        fitting = [table for ranks, table in found.thresholds if ranks <= size]
        return fitting[-1] if fitting else found.thresholds[0][1]

    @property
    def fingerprint(self) -> str:
        """A hash of all thresholds, without costs. Ranks with equal hashes choose alike."""
        tables = {name: found.thresholds for name, found in sorted(self.transports.items())}
        return hashlib.sha256(repr(tables).encode()).hexdigest()[:16]

    def encode(self) -> str:
        """Return the tuning as JSON."""
        transports: dict[str, Any] = {}
        for name, found in self.transports.items():
            entry = transports[name] = {}
            if found.cost is not None:
                entry["cost"] = dataclasses.asdict(found.cost)
            tables = {str(ranks): _differences(table) for ranks, table in found.thresholds}
            entry["thresholds"] = tables
        document = {"format": FORMAT, "source": self.source, "transports": transports}
        return json.dumps(document, indent=1)

    @classmethod
    def decode(cls, text: str, name: str) -> Tuning:
        """Return the tuning in the JSON ``text``; ValueErrors call it ``name``."""
        try:
            return cls._of(**json.loads(text))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{name} is not a tuning file: {error}; expected what meshlib tune writes"
            ) from error

    @classmethod
    def _of(cls, format: int, source: str, transports: dict[str, dict[str, Any]]) -> Tuning:
        if format != FORMAT:
            raise ValueError(f"format is {format!r}, expected {FORMAT}")
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"source is {source!r}, expected text")
        return cls(source, {name: TransportTuning.of(**t) for name, t in transports.items()})


def load(path: str) -> Tuning:
    """Return the tuning in a file; raise OSError if it cannot be read, ValueError if it is not a
    tuning file.
    """
    return Tuning.decode(Path(path).read_text(encoding="utf-8"), path)


@functools.cache
def shipped() -> Tuning:
    """Return the tuning that is shipped with the package; ``source`` describes the machine."""
    return load(str(_SHIPPED))


def from_environment() -> Tuning:
    """Return the tuning in the file that ``MESHLIB_TUNING`` names, else the shipped tuning.

    Raises ValueError with the file's name if it cannot be used.
    """
    path = os.environ.get(environment.TUNING)
    if not path:
        return shipped()
    try:
        return load(path)
    except OSError as error:
        raise ValueError(f"{environment.TUNING}={path}: {error.strerror}") from error


def agree(tuning: Tuning, store: Store, rank: int) -> None:
    """Raise ValueError if this rank's thresholds differ from the other ranks', because ranks that
    choose different algorithms would deadlock.
    """
    own = f"{tuning.fingerprint} {rank} {tuning.source}".encode()
    first, _, text = store.compare_set("tuning", b"", own).decode().partition(" ")
    if first != tuning.fingerprint:
        other, _, source = text.partition(" ")
        raise ValueError(
            f"{environment.TUNING}: rank {rank} has the tuning {tuning.source!r}, rank {other}"
            f" {source!r}; expected the same on all ranks"
        )


def _differences(table: Thresholds) -> dict[str, int]:
    default = dataclasses.asdict(DEFAULT)
    return {key: value for key, value in dataclasses.asdict(table).items() if value != default[key]}
