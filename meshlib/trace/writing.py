"""What a rank writes about itself when something went wrong. ``dump`` reads it.

A dump is one JSON file a rank, ``rank<N>.json``. Times are seconds on the wall clock, so that ranks
on several hosts can be laid side by side as well as their clocks agree.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshlib.recording.recorder import Record

FORMAT = 1


class GroupInfo(Protocol):
    """The side of a ProcessGroup that a dump names."""

    id: str
    ranks: tuple[int, ...]

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        ...


def as_dict(
    rank: int,
    size: int,
    records: Sequence[Record],
    groups: Iterable[GroupInfo],
    error: str | None,
    workers: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the dump of one rank, as it is written; ``workers`` are names in remote calls."""
    offset = time.time() - time.monotonic()
    calls: list[dict[str, Any]] = []
    for record in records:
        call = record.as_json()
        for name in ("issued", "started", "ended"):
            call[name] = call[name] + offset if call[name] else 0.0
        calls.append(call)
    return {
        "format": FORMAT,
        "rank": rank,
        "size": size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "written": time.time(),
        "error": error,
        "groups": {g.id: [g.group_desc, list(g.ranks)] for g in groups},
        "workers": list(workers),
        "calls": calls,
    }


def write(directory: str | Path, dump: Mapping[str, Any]) -> Path:
    """Write ``dump`` into ``directory`` (made if missing) and return its path.

    The file appears whole or not at all. Raises OSError.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{dump['rank']}.json"
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        unfinished.write_text(json.dumps(dump))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)  # a full disk is not to be left fuller
        raise
    return path
