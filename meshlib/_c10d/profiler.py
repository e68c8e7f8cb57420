"""Profiling: the calls inside a ``with`` block, with bytes, durations, bandwidths and names."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from meshlib._groups.process_group import ProcessGroup
from meshlib._job.current import current_world
from meshlib._job.world import World
from meshlib._recording.recorder import Record
from meshlib._trace.dump import RankDump


@dataclass(frozen=True)
class Summary:
    """The totals of one kind of call on one group, in seconds, bytes and bytes per second."""

    kind: str
    group: str
    calls: int
    nbytes: int
    seconds: float
    longest: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second, including the time of waiting for other ranks."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class profile:
    """Record this rank's calls: ``with meshlib.profile() as p: …; print(p)``.

    While it is active, calls are also ranges in the timelines of ``jax.profiler`` and NVTX, if
    those libraries are loaded. ``export`` writes the calls for ``meshlib trace``.
    """

    def __init__(self) -> None:
        self._world: World | None = None
        self._records: list[Record] = []
        self._kept: list[ProcessGroup] | None = None
        self._outer: Any = None

    def __enter__(self) -> Self:
        """Start recording. Raises ValueError without a job."""
        self._world, self._kept = current_world(), None
        recorder = self._world.recorder
        self._records = recorder.follow()
        self._outer, recorder.annotate = recorder.annotate, _annotation()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop recording; keep the records and the groups, also after the job's end."""
        assert self._world is not None
        self._kept = self._world.groups()
        self._world.recorder.unfollow(self._records)
        self._world.recorder.annotate = self._outer

    def summaries(self) -> list[Summary]:
        """Return a summary for each kind of call on each group, the most expensive first."""
        names = {g.id: g.group_desc or g.id for g in self._groups()}
        found: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for record in self._records:
            if record.ended:
                found[record.kind, names.get(record.group, record.group)].append(record)
        rows = [
            Summary(
                kind,
                group,
                len(records),
                sum(r.nbytes for r in records),
                sum(r.ended - r.started for r in records),
                max(r.ended - r.started for r in records),
            )
            for (kind, group), records in found.items()
        ]
        return sorted(rows, key=lambda row: -row.seconds)

    def export(self, directory: str | Path) -> Path:
        """Write this rank's calls into ``directory`` for ``meshlib trace``; return the path.

        Raises RuntimeError if the profile was never entered, OSError if the file cannot be written.
        """
        world = self._world
        if world is None:
            raise RuntimeError("nothing was profiled: use the profile as a context manager first")
        dump = RankDump.of(world.rank, world.size, self._records, self._groups())
        return dump.write(directory)

    def __str__(self) -> str:
        head = (
            f"{'call':<16} {'group':<20} {'calls':>6} {'MB':>10} {'total ms':>10} {'mean us':>10}"
        )
        lines = [f"{head} {'max us':>10} {'GB/s':>7}"]
        lines += [
            f"{row.kind:<16} {row.group[:20]:<20} {row.calls:>6} {row.nbytes / 1e6:>10.3f} "
            f"{row.seconds * 1e3:>10.3f} {row.seconds / row.calls * 1e6:>10.1f} "
            f"{row.longest * 1e6:>10.1f} {row.bandwidth / 1e9:>7.2f}"
            for row in self.summaries()
        ]
        return "\n".join(lines)

    def _groups(self) -> list[ProcessGroup]:
        if self._kept is not None:
            return self._kept
        return [] if self._world is None else self._world.groups()


def record_comm(name: str) -> AbstractContextManager[None]:
    """Return a context manager that names the calls which this thread issues in its block.

    In profiles, ``name`` replaces names like ``meshlib.all_reduce``; flight records show both.
    Raises TypeError for a ``name`` that is not a ``str``, ValueError without a job.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"name must be a str, got {name!r}")
    return current_world().recorder.named(name)


def _annotation() -> Any:
    """Return a function that opens a range in every loaded profiler; None without a profiler."""
    makers: list[Any] = []
    if "jax" in sys.modules:
        makers.append(sys.modules["jax"].profiler.TraceAnnotation)
    if "nvtx" in sys.modules:
        makers.append(sys.modules["nvtx"].annotate)
    if not makers:
        return None

    def annotate(name: str) -> AbstractContextManager[object]:
        stack = ExitStack()
        for make in makers:
            stack.enter_context(make(name))
        return stack

    return annotate
