"""Reading what ranks wrote about themselves when something went wrong (``writing``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from meshlib.recording.recorder import COLLECTIVE
from meshlib.trace import HOW_TO_KEEP, RECORDS
from meshlib.trace.writing import FORMAT


@dataclass(frozen=True)
class CallDump:
    """One call of one rank. ``started`` and ``ended`` are 0 for a call that did not get so far."""

    rank: int
    group: str
    sequence: int
    call: str
    header: tuple[int, ...]
    nbytes: int
    peer: int
    site: str
    state: str
    issued: float
    started: float
    ended: float
    error: str | None
    waiting_for: int | None

    @property
    def collective(self) -> bool:
        """Whether it is a collective (else point to point)."""
        return self.peer == COLLECTIVE

    @property
    def kind(self) -> str:
        """The call's name: ``all_reduce``."""
        words = self.call.split()
        return words[2] if len(words) > 2 else self.call


@dataclass(frozen=True)
class RankDump:
    """All that one rank wrote."""

    rank: int
    size: int
    host: str
    pid: int
    written: float
    error: str | None
    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    """By id: description and global ranks."""
    calls: tuple[CallDump, ...]
    workers: tuple[str, ...] = ()
    """The names that the ranks have in remote calls, by rank."""


_TYPES = {"int": int, "str": str, "float": int | float, "str | None": str | None}
_TYPES["int | None"] = int | None
_PLAIN = {
    cls: [(field.name, _TYPES[str(field.type)]) for field in fields(cls) if field.type in _TYPES]
    for cls in (CallDump, RankDump)
}
"""The fields that are plain values, and of which types these are."""
_AS_WRITTEN = [name for name, _ in _PLAIN[CallDump] if name not in ("rank", "nbytes")]


def parse(data: Mapping[str, Any]) -> RankDump:
    """Return the dump that ``writing.as_dict`` made. Raises ValueError for anything else."""
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"format is {data['format']}; expected {FORMAT}")
        rank = data["rank"]
        calls = tuple(
            CallDump(
                rank=rank,
                nbytes=call["bytes"],
                header=tuple(call["header"]),
                **{name: call[name] for name in _AS_WRITTEN},
            )
            for call in data["calls"]
        )
        groups = {key: (desc, tuple(ranks)) for key, (desc, ranks) in data["groups"].items()}
        plain = {name: data[name] for name, _ in _PLAIN[RankDump]}
        workers = tuple(data.get("workers", ()))
        found = RankDump(groups=groups, calls=calls, workers=workers, **plain)
        _check(found)
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a flight record: {error!r}") from error


def decode(data: bytes) -> RankDump:
    """Return the dump in a file's bytes. Raises ValueError for anything else."""
    try:
        return parse(json.loads(data))
    except RecursionError:
        raise ValueError("not a flight record: it is nested too deeply") from None


def _check(found: RankDump) -> None:
    """Raise TypeError naming the first field that is of another type than it should be.

    Whoever looks at a dump computes with it: what is wrong is to be told by where it was read.
    """
    _check_fields(found)
    for desc, ranks in found.groups.values():
        _check_values("groups", (desc,), str)
        _check_values("groups", ranks, int)
    _check_values("workers", found.workers, str)
    for call in found.calls:
        _check_fields(call)
        _check_values("header", call.header, int)


def _check_values(name: str, values: Sequence[object], kind: type) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{name} has {value!r}")


def _check_fields(found: RankDump | CallDump) -> None:
    for name, allowed in _PLAIN[type(found)]:
        value = getattr(found, name)
        if not isinstance(value, allowed):
            raise TypeError(f"{name} is {value!r}")


def find(directory: str | Path) -> Path:
    """Return where the flight records are: ``directory`` itself, or the newest of those below it.

    So it takes what ``meshrun --log-dir`` was given, where each run has its own (``RUN/trace``).
    Raises FileNotFoundError when there is none.
    """
    folder = Path(directory)
    for pattern in (RECORDS, f"*/{RECORDS}", f"*/*/{RECORDS}"):
        paths = list(folder.glob(pattern))
        if paths:
            return max(paths, key=lambda path: path.stat().st_mtime).parent
    lacks = f"has no flight records ({RECORDS}), nor a run below it"
    raise FileNotFoundError(
        f"{directory} {lacks if folder.is_dir() else 'is no folder'}; {HOW_TO_KEEP}"
    )


def read(directory: str | Path) -> list[RankDump]:
    """Return the dumps in ``directory``, by rank.

    Raises FileNotFoundError when there is none, ValueError naming a file that is no dump.
    """
    paths = sorted(Path(directory).glob(RECORDS))
    if not paths:
        raise FileNotFoundError(f"{directory} has no flight records ({RECORDS})")
    dumps: list[RankDump] = []
    for path in paths:
        try:
            dumps.append(decode(path.read_bytes()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return sorted(dumps, key=lambda dump: dump.rank)


def first_line(text: str | None) -> str:
    """Return what an error says first: what follows may be tables and stacks. Of None nothing."""
    return (text or "").partition("\n")[0]
