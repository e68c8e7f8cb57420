"""Tables of thresholds and costs: those that ``meshlib tune`` measures, and what is shipped."""

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
from typing import Any, TypeVar, cast

from transport import _environment as environment
from transport._choosing.choice import DEFAULT, Thresholds
from transport._choosing.cost import Cost
from transport._store.base import Store

FORMAT = 1
T = TypeVar("T")
_SHIPPED = Path(__file__).with_name("tuning.json")


@dataclass(frozen=True, slots=True)
class TransportTuning:
    """What was measured over one transport: ``cost`` (None where that is other transports'), and
    thresholds by number of ranks (rising). What a table does not say is as in ``DEFAULT``.
    """

    cost: Cost | None
    thresholds: tuple[tuple[int, Thresholds], ...] = ()


@dataclass(frozen=True, slots=True)
class Tuning:
    """``source`` says how, when and where; ``transports`` has what was measured, by name."""

    source: str
    transports: Mapping[str, TransportTuning] = field(default_factory=dict[str, TransportTuning])

    def thresholds(self, transport: str, size: int) -> Thresholds:
        """Return the thresholds for ``size`` ranks: those of the most ranks that are no more, or of
        the fewest that were measured.
        """
        found = self.transports.get(transport)
        if found is None or not found.thresholds:
            return DEFAULT
        fitting = [table for ranks, table in found.thresholds if ranks <= size]
        return fitting[-1] if fitting else found.thresholds[0][1]

    @property
    def fingerprint(self) -> str:
        """What is equal for all that choose alike: thresholds count, costs do not."""
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
        """Return the tuning in ``text``; raise ValueError that says what is wrong in ``name``."""
        try:
            document = _Table(json.loads(text), name)
        except ValueError as error:
            raise ValueError(f"{name} is no JSON: {error}") from error
        if document.take("format", int) != FORMAT:
            raise ValueError(f"{name} must have format {FORMAT}")
        source = document.take("source", str)
        transports = document.table("transports")
        found = {key: _decode_transport(transports.table(key)) for key in transports.keys}
        document.end()
        return cls(source, found)


def load(path: str) -> Tuning:
    """Return the tuning in a file; raise OSError when it cannot be read, ValueError for another
    content.
    """
    return Tuning.decode(Path(path).read_text(encoding="utf-8"), path)


@functools.cache
def shipped() -> Tuning:
    """Return the tuning that comes with the package; its ``source`` says on what machine it was
    made.
    """
    return load(str(_SHIPPED))


def from_environment() -> Tuning:
    """Return the tuning in the file that ``MESHLIB_TUNING`` names, else what is shipped.

    Raises ValueError that names the file when it cannot be used.
    """
    path = os.environ.get(environment.TUNING)
    if not path:
        return shipped()
    try:
        return load(path)
    except OSError as error:
        raise ValueError(f"{environment.TUNING}={path}: {error.strerror}") from error


def agree(tuning: Tuning, store: Store, rank: int) -> None:
    """Raise ValueError when this rank would choose algorithms otherwise than others do, who would
    then wait for each other in vain.
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


def _decode_transport(entry: _Table) -> TransportTuning:
    cost = _decode_cost(entry.table("cost")) if "cost" in entry.keys else None
    tables = entry.table("thresholds")
    found: dict[int, Thresholds] = {}
    for ranks in tables.keys:
        if not ranks.isascii() or not ranks.isdigit() or int(ranks) < 1:
            raise ValueError(f"{tables.name} must be by numbers of ranks, got {ranks!r}")
        found[int(ranks)] = _decode_thresholds(tables.table(ranks))
    entry.end()
    return TransportTuning(cost, tuple((ranks, found[ranks]) for ranks in sorted(found)))


def _decode_cost(numbers: _Table) -> Cost:
    fields = [field.name for field in dataclasses.fields(Cost)]
    cost = Cost(*(numbers.positive(name) for name in fields))
    numbers.end()
    return cost


def _decode_thresholds(sizes: _Table) -> Thresholds:
    known = [field.name for field in dataclasses.fields(Thresholds)]
    values = {key: sizes.take(key, int) for key in sizes.keys if key in known}
    sizes.end()
    for key in ("segment", "piece"):
        if values.get(key, 1) < 1:
            raise ValueError(f"{sizes.name}.{key} must be at least 1, got {values[key]}")
    return Thresholds(**values)


class _Table:
    """A JSON object that is read key by key; ``name`` is what errors call it."""

    def __init__(self, value: object, name: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {value!r:.80}")
        self._left = dict(cast("dict[str, Any]", value))
        self.keys = tuple(self._left)
        self.name = name

    def take(self, key: str, kind: type[T]) -> T:
        """Return the value under ``key``, which must be of ``kind``."""
        if key not in self._left:
            raise ValueError(f"{self.name} has no {key!r}")
        value = self._left.pop(key)
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self.name}.{key} must be {kind.__name__}, got {value!r:.80}")
        return value

    def table(self, key: str) -> _Table:
        """Return the object under ``key``."""
        return _Table(self.take(key, dict), f"{self.name}: {key}")

    def positive(self, key: str) -> float:
        """Return the number under ``key``, which must be positive and finite."""
        value = self.take(key, float)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{self.name}.{key} must be a positive number, got {value!r}")
        return value

    def end(self) -> None:
        """Raise ValueError when there is a key that nobody took."""
        if self._left:
            raise ValueError(f"{self.name} has unknown keys: {', '.join(sorted(self._left))}")
