"""The user's choice of destinations for the ranks' output."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

STREAMS = (1, 2)
"""Standard output and error: descriptors, and also the bits of ``--redirects`` and ``--tee``."""

PerRank = dict[int | None, int]


@dataclass(frozen=True, slots=True)
class Route:
    """The destination of one stream of one rank; ``inherited``: the launcher's own stream."""

    console: bool
    file: bool
    inherited: bool
    prefix: bool


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The user's options for the ranks' output.

    ``redirects`` and ``tee`` map local ranks (None: all others) to bits of ``STREAMS``; ``shown``
    are the local ranks whose output reaches the console (None: all).
    """

    log_dir: Path | None = None
    redirects: PerRank = field(default_factory=PerRank)
    tee: PerRank = field(default_factory=PerRank)
    shown: frozenset[int] | None = None
    prefix: bool = False

    def route(self, local_rank: int, stream: int, ranks: int, terminal: bool) -> Route:
        """Return the destination of ``stream`` of a local rank (of ``ranks``).

        ``terminal``: the launcher's own stream is a terminal.
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


def parse_streams(text: str) -> PerRank:
    """Read ``--redirects`` or ``--tee``: ``3``, or ``0:1,2:3`` for single local ranks.

    Raises ValueError with the expected format.
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
