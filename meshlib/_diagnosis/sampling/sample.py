"""``Sample``: the calls of one rank since its last sample, and the sample's key in the store.

Launchers and monitors read samples, so this module must not import NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from meshlib._recording.call_report import CallReport
from meshlib._records import JsonRecord

SAMPLED = "samples/ranks"
"""The log of the ranks that have posted a sample, one line each."""


def sample_key(rank: int) -> str:
    """Return the store's key of the last sample of ``rank``."""
    return f"samples/{rank}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's calls on one ``group``, called ``name``, in a sample's time.

    ``calls`` is the number of ended calls, ``nbytes`` the size of the rank's arrays in them. The
    rank was inside calls on the group for ``seconds``, moving data or waiting for other members.
    """

    group: str
    name: str
    calls: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """The ``seconds`` from one step to the next, and the number of ``committed`` steps.

    The number is -1 if the program's loop does not report steps; the time is then the period of the
    calls.
    """

    seconds: float
    committed: int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A rank's ``index``, from 0 to ``size`` - 1, along the mesh dim ``name``."""

    name: str
    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample(JsonRecord):
    """The calls of ``rank`` in the last ``seconds``, of which it was in calls for ``inside``.

    ``number`` counts the rank's samples. ``taken`` is in seconds since 1970 on the rank's host. In
    the current ``epoch``, of ``size`` ranks, the rank has the ``place`` (-1: none). ``total``
    counts its calls on all groups since it joined. ``open_calls`` are the oldest running calls, on
    groups of ``traffic``.
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
        """Return the age in seconds of ``call``, one of ``open_calls``, at the sample's time."""
        return self.taken - call.issued
