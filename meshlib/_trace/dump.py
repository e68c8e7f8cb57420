"""Flight records as files: a rank's calls, written when a job fails.

Each rank writes one JSON file, ``rank<N>.json``. Times are wall-clock seconds, so records of
several hosts are comparable to the precision of their clocks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from meshlib._recording.call_report import CallReport, report_calls
from meshlib._recording.recorder import Record
from meshlib._records import JsonRecord
from meshlib._trace import HOW_TO_KEEP, RECORDS, GroupInfo

FORMAT = 2


@dataclass(frozen=True)
class RankDump(JsonRecord):
    """The flight record of one rank, ``written`` at a time in seconds since 1970.

    ``groups`` has the description and the global ranks of each group by its id, ``workers`` the
    names of the ranks in remote calls. ``error`` is the message of the first failure.
    """

    title: ClassVar[str] = "flight record"
    rank: int
    size: int
    host: str
    pid: int
    written: float
    error: str | None
    groups: Mapping[str, tuple[str, tuple[int, ...]]]
    calls: Sequence[CallReport]
    workers: Sequence[str] = ()
    format: int = 0

    @classmethod
    def of(
        cls,
        rank: int,
        size: int,
        records: Iterable[Record],
        groups: Iterable[GroupInfo],
        error: str | None = None,
        workers: Sequence[str] = (),
    ) -> Self:
        """Return the dump of ``rank`` in a job of ``size`` ranks, with the calls ``records``."""
        known = {group.id: (group.group_desc, group.ranks) for group in groups}
        members = {group: ranks for group, (_, ranks) in known.items()}
        return cls(
            rank=rank,
            size=size,
            host=socket.gethostname(),
            pid=os.getpid(),
            written=time.time(),
            error=error,
            groups=known,
            calls=report_calls(records, members),
            workers=tuple(workers),
            format=FORMAT,
        )

    def write(self, directory: str | Path) -> Path:
        """Write the dump into ``directory`` (created if missing) and return its path.

        The write is atomic. Raises OSError.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{self.rank}.json"
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        try:
            unfinished.write_text(self.pack())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)  # leave no partial file on a full disk
        return path

    @classmethod
    def unpack(cls, data: bytes | str) -> Self:
        """Return the dump in ``data``; raise ValueError, which has the reason, if it is invalid."""
        found = super().unpack(data)
        if found.format != FORMAT:
            raise ValueError(f"not a {cls.title}: format is {found.format}; expected {FORMAT}")
        return found


def find(directory: str | Path) -> Path:
    """Return the folder of flight records: ``directory`` itself, or the newest below it.

    ``directory`` may be that of ``meshrun --log-dir``, in which each run has a folder
    (``RUN/trace``). Raises FileNotFoundError when there are no records.
    """
    folder = Path(directory)
    for pattern in (RECORDS, f"*/{RECORDS}", f"*/*/{RECORDS}"):
        paths = list(folder.glob(pattern))
        if paths:
            return max(paths, key=lambda path: path.stat().st_mtime).parent
    lacks = f"has no flight records ({RECORDS}), nor a run below it"
    raise FileNotFoundError(
        f"{directory} {lacks if folder.is_dir() else 'is not a folder'}; {HOW_TO_KEEP}"
    )


def read(directory: str | Path) -> list[RankDump]:
    """Return the dumps in ``directory``, by rank.

    Raises FileNotFoundError when there is none, ValueError, which names the file, for an invalid
    one.
    """
    paths = sorted(Path(directory).glob(RECORDS))
    if not paths:
        raise FileNotFoundError(f"{directory} has no flight records ({RECORDS})")
    dumps: list[RankDump] = []
    for path in paths:
        try:
            dumps.append(RankDump.unpack(path.read_bytes()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return sorted(dumps, key=lambda dump: dump.rank)


def first_line(text: str | None) -> str:
    """Return the first line of an error, without tables and stacks; empty for None."""
    return (text or "").partition("\n")[0]
