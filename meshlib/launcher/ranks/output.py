"""Where the ranks' output goes: straight through, by whole lines with a prefix, into files.

A rank that is alone, and the first one of several on a terminal, write to the launcher's own
standard output, so that progress bars and prompts work. Everything else comes through a pipe to
``OutputPump``, which writes whole lines: no line of one rank is ever inside another's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from meshlib.launcher.ranks.pump import OutputPump

STREAMS = (1, 2)
"""Standard output and error: descriptors, and also the bits of ``--redirects`` and ``--tee``."""

PerRank = dict[int | None, int]


@dataclass(frozen=True, slots=True)
class Route:
    """Where one stream of one rank goes; ``inherited``: it is the launcher's own."""

    console: bool
    file: bool
    inherited: bool
    prefix: bool


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the user asked for.

    ``redirects`` and ``tee`` map local ranks (None: all that are not named) to bits of
    ``STREAMS``; ``shown`` are the local ranks whose output reaches the console (None: all).
    """

    log_dir: Path | None = None
    redirects: PerRank = field(default_factory=PerRank)
    tee: PerRank = field(default_factory=PerRank)
    shown: frozenset[int] | None = None
    prefix: bool = False

    def route(self, local_rank: int, stream: int, ranks: int, terminal: bool) -> Route:
        """Return where ``stream`` of a local rank (of ``ranks``) goes; ``terminal``: whether the
        launcher's own is one.
        """
        tee = bool(_bits(self.tee, local_rank) & stream)
        file = tee or bool(_bits(self.redirects, local_rank) & stream)
        shown = self.shown is None or local_rank in self.shown
        console = shown and (tee or not file)
        first = (
            ranks == 1 or self.shown == frozenset({local_rank}) or (terminal and local_rank == 0)
        )
        return Route(
            console=console,
            file=file,
            inherited=console and not file and not self.prefix and first,
            prefix=self.prefix or (tee and ranks > 1),
        )


def _bits(choice: PerRank, local_rank: int) -> int:
    return choice.get(local_rank, choice.get(None, 0))


@dataclass(frozen=True, slots=True)
class RankStreams:
    """What one rank gets as standard output and error; None: the launcher's own.

    ``logged``: standard error is kept in a file.
    """

    stdout: int | None
    stderr: int | None
    logged: bool

    @property
    def inherited(self) -> bool:
        """Whether both are the launcher's own."""
        return self.stdout is None and self.stderr is None

    def close(self) -> None:
        """Close the launcher's copies, once the rank has its own."""
        for descriptor in (self.stdout, self.stderr):
            if descriptor is not None:
                os.close(descriptor)


def connect(
    options: OutputOptions,
    pump: OutputPump,
    rank: int,
    local_rank: int,
    ranks: int,
    directory: Path,
) -> RankStreams:
    """Open the streams of one rank; files go to ``directory``. The caller closes the result."""
    out, err = (options.route(local_rank, fd, ranks, os.isatty(fd)) for fd in STREAMS)
    return RankStreams(
        _open(out, pump, rank, 1, directory / "stdout.log"),
        _open(err, pump, rank, 2, directory / "stderr.log"),
        logged=err.file,
    )


def _open(route: Route, pump: OutputPump, rank: int, console: int, path: Path) -> int | None:
    if route.inherited:
        return None
    file: BinaryIO | None = None
    if route.file:
        # The pump keeps it open for as long as the rank writes, and closes it.
        file = open(path, "ab", buffering=0)  # noqa: SIM115
    if not route.console:
        if file is None:
            return os.open(os.devnull, os.O_WRONLY)
        with file:
            return os.dup(file.fileno())
    reader, writer = os.pipe2(os.O_CLOEXEC)
    prefix = f"[rank {rank}] " if route.prefix else ""
    pump.add(reader, console, prefix.encode(), file)
    return writer


def parse_streams(text: str) -> PerRank:
    """Read ``--redirects`` or ``--tee``: ``3``, or ``0:1,2:3`` for single local ranks.

    Raises ValueError that says what is expected.
    """
    result: PerRank = {}
    for item in text.split(","):
        rank, colon, bits = item.strip().rpartition(":")
        try:
            key, value = (int(rank) if colon else None), int(bits)
        except ValueError:
            value = key = -1
        if value not in range(4) or (key is not None and key < 0) or key in result:
            raise ValueError(
                "expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:VALUE pairs"
                f" such as 0:1,1:3; got {text!r}"
            )
        result[key] = value
    return result
