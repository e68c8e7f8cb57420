"""``Sample``: what one rank has done since the last one, and where it keeps that in the store.

Nothing here needs NumPy: launchers and monitors read samples.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from meshlib.records import build, values_of

SAMPLED = "samples/ranks"
"""The log of the ranks that have posted a sample, a line each."""


def sample_key(rank: int) -> str:
    """Return where the last sample of ``rank`` is."""
    return f"samples/{rank}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's calls on one ``group``, called ``name``, in a sample's time.

    ``calls`` have ended, with ``nbytes`` of the rank's own arrays; it was inside of calls for
    ``seconds``, of which what the other members did not need was spent waiting for them.
    """

    group: str
    name: str
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call under way for ``seconds``. ``waiting_for``: the global rank, where it is known.

    ``blocking``: a thread stands still for it.
    """

    call: str
    group: str
    site: str
    state: str
    blocking: bool
    seconds: float
    waiting_for: int | None


@dataclass(frozen=True, slots=True)
class StepTime:
    """``seconds`` from one step to the next; how many were ``committed``: -1 where no loop says so,
    and the time is the period of the calls.
    """

    seconds: float
    committed: int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's place, from 0 to ``size`` - 1, along a mesh dim."""

    name: str
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What ``rank`` has done in the last ``seconds``; ``inside`` of them it was in calls.

    ``number`` counts a rank's samples. ``size`` is that of the present ``epoch``, in which the rank
    has the ``place`` (-1: none), and ``total`` the calls on all groups since the rank came.
    ``open_calls`` are the oldest of those under way.
    """

    rank: int
    number: int
    host: str
    pid: int
    epoch: int
    place: int
    size: int
    seconds: float
    inside: float
    total: int
    step: StepTime | None
    mesh: Sequence[Coordinate]
    traffic: Sequence[Traffic]
    open_calls: Sequence[OpenCall]

    def pack(self) -> str:
        """Return the sample as JSON."""
        return json.dumps(self, default=values_of, separators=(",", ":"))

    @classmethod
    def unpack(cls, data: bytes | str) -> Sample:
        """Return the sample in ``data``. Raises ValueError for what is none."""
        try:
            return build(cls, json.loads(data))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a sample: {error!r}") from error
