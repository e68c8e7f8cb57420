"""``Sample``: the calls of one rank since its last sample, and the sample's key in the store.

Nothing here needs NumPy: launchers and monitors read samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from meshlib._recording.call_report import CallReport
from meshlib._records import JsonRecord

SAMPLED = "samples/ranks"
"""The log of the ranks that have posted a sample, a line each."""


def sample_key(rank: int) -> str:
    """Return where the last sample of ``rank`` is."""
    return f"samples/{rank}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's calls on one ``group``, called ``name``, in a sample's time.

    ``calls`` of them have ended, with ``nbytes`` of the rank's own arrays. The rank was inside of
    calls for ``seconds``: moving data, or waiting for the other members.
    """

    group: str
    name: str
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """``seconds`` from one step to the next, and the number of ``committed`` steps.

    The number is -1 where no loop says it; the time is then the period of the calls.
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
class Sample(JsonRecord):
    """The calls of ``rank`` in the last ``seconds``; it was in calls for ``inside`` of them.

    A rank's samples have numbers; this one was ``taken`` at that time, in seconds since 1970 on the
    rank's host. The present ``epoch`` has that ``size``, and the rank that ``place`` in it (-1:
    none). The rank has made ``total`` calls on all groups since it came. The ``open_calls`` are the
    oldest calls under way, on groups of ``traffic``.
    """

    title: ClassVar[str] = "sample"
    rank: int
    number: int
    taken: float
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
    open_calls: Sequence[CallReport]

    def name_of(self, group: str) -> str:
        """Return the name of the group with the id ``group``."""
        return next((one.name for one in self.traffic if one.group == group), group)

    def age(self, call: CallReport) -> float:
        """Return how many seconds ``call``, one of ``open_calls``, had been under way."""
        return self.taken - call.issued
