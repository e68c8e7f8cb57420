"""``Sampler``: samples of one rank, made from its flight record."""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

from meshlib._calls.members import Members
from meshlib._diagnosis.sampling.sample import Coordinate, Sample, StepTime, Traffic
from meshlib._recording.call_report import CallReport, report_calls
from meshlib._recording.recorder import CAPACITY, FlightRecorder, Record
from meshlib._recording.stacks import is_in_call

OPEN_CALLS = 4
_MOST_NAMES = 1000
REPEATED = 3
"""The number of repetitions after which a sequence of calls counts as a step."""
_Call = tuple[int, int, str, int]
_STEPS = 10
"""A step's time is the mean over at most this many steps."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The groups of ``rank`` by id, its place in the job, and its coordinates on a mesh."""

    rank: int
    groups: Mapping[str, Members]
    epoch: int
    place: int
    size: int
    mesh: Sequence[Coordinate]


class HasStatus(Protocol):
    """An object with the status of a sampled rank."""

    def status(self) -> RankStatus:
        """Return the rank's current status."""
        ...


class Sampler:
    """A maker of samples from the calls in ``recorder`` of the rank ``source``.

    Only one thread may use it at a time. A sample covers the calls since the last sample, at most
    ``CAPACITY``. If there are more, its time begins with the oldest call that it covers.
    ``main_thread`` is the id of the rank's main thread.
    """

    def __init__(self, recorder: FlightRecorder, main_thread: int, source: HasStatus) -> None:
        self._recorder = recorder
        self._main_thread = main_thread
        self._source = source
        self._number = 0
        self._total = 0
        self._since = 0.0
        self._newest: Record | None = None
        self._open: list[Record] = []
        self._names: dict[str, str] = {}
        # The calls (line, group, bytes) and their times by thread, to find the period of steps.
        self._history = defaultdict[int, deque[tuple[_Call, float]]](lambda: deque(maxlen=CAPACITY))

    def take(self) -> Sample:
        """Return the sample of the time since the last ``take``."""
        now = time.monotonic()
        recent, begin = self._recent(now)
        at = self._source.status()
        self._learn_names(at)
        traffic, inside = self._count([*self._open, *recent], begin, now)
        self._since = now
        self._number += 1
        self._total += len(recent)
        return Sample(
            rank=at.rank,
            number=self._number,
            taken=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            epoch=at.epoch,
            place=at.place,
            size=at.size,
            seconds=max(now - begin, 1e-9),
            inside=inside,
            total=self._total,
            step=self._step(recent),
            mesh=list(at.mesh),
            traffic=traffic,
            open_calls=self._under_way(at.groups),
        )

    def _recent(self, now: float) -> tuple[list[Record], float]:
        """Return the new records, oldest first, and the time at which the sample begins."""
        records = self._recorder.records()[-CAPACITY:]
        newest = self._newest
        recent = list(takewhile(lambda record: record is not newest, reversed(records)))[::-1]
        if not recent:
            return recent, self._since or now
        self._newest = recent[-1]
        forgotten = newest is not None and len(recent) == len(records)
        return recent, recent[0].issued if forgotten or not self._since else self._since

    def _count(
        self, records: Iterable[Record], begin: float, now: float
    ) -> tuple[list[Traffic], float]:
        """Return the traffic of each group, and the time in calls; remember the open calls."""
        counts = defaultdict[str, list[float]](lambda: [0, 0, 0.0])
        spans: list[tuple[float, float]] = []
        self._open = []
        for record in records:
            counted = counts[record.group]
            ended = record.ended
            if ended:
                counted[0] += 1
                counted[1] += record.nbytes
            else:
                self._open.append(record)
                ended = now
            started = record.started
            if started:
                started = max(started, begin)
                if ended > started:
                    counted[2] += ended - started
                    spans.append((started, ended))
        traffic = [
            Traffic(group, self._names.get(group, group), int(calls), int(nbytes), seconds)
            for group, (calls, nbytes, seconds) in counts.items()
        ]
        return traffic, covered(spans)

    def _learn_names(self, at: RankStatus) -> None:
        """Store the groups' names; a dim over all ranks gives its name to the default group."""
        whole = next((one.name for one in at.mesh if one.size == at.size > 1), "")
        if len(self._names) > _MOST_NAMES:  # drop the names of destroyed groups
            self._names.clear()
        for group, members in at.groups.items():
            name = whole if whole and len(members.ranks) == at.size else members.group_desc
            self._names[group] = name or group

    def _under_way(self, groups: Mapping[str, Members]) -> list[CallReport]:
        records = [record for record in self._open if not record.ended][:OPEN_CALLS]
        # The main thread may wait for calls that it issued earlier, usually the oldest first.
        waits = bool(records) and not any(record.sync for record in records)
        waits = waits and is_in_call(self._main_thread)
        ranks = {group: members.ranks for group, members in groups.items()}
        reports = report_calls(records, ranks)
        return [replace(reports[0], blocking=True), *reports[1:]] if waits else reports

    def _step(self, recent: Iterable[Record]) -> StepTime | None:
        for record in recent:
            call = id(record.code), record.instruction, record.group, record.nbytes
            self._history[record.thread].append((call, record.issued))
        marks = self._recorder.steps
        if marks.count:
            moments = list(marks.moments)[-_STEPS - 1 :]
            if len(moments) < 2:
                return None
            seconds = (moments[-1] - moments[0]) / (len(moments) - 1)
            return StepTime(seconds, marks.count)
        if not self._history:
            return None
        calls, issued = zip(*max(self._history.values(), key=len), strict=True)
        period = period_of(calls)
        if not period:
            return None
        steps = min(_STEPS, (len(issued) - 1) // period)
        return StepTime((issued[-1] - issued[-1 - steps * period]) / steps, -1)


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the total time that ``spans``, pairs (begin, end), cover together."""
    total, until = 0.0, 0.0
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def period_of(calls: Sequence[Hashable]) -> int:
    """Return the number of calls in a step, 0 when the newest of ``calls`` have no period.

    Each step of training makes the same calls, at the same lines, of the same sizes, in the same
    order. So the period of the sequence is a step, whatever the loop looks like.

    The result is the shortest period of the longest run, up to the newest call, with at least
    ``REPEATED`` periods. The run must have at least half of all calls, which excludes loops inside
    a step. The prefix function of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977) finds it in
    time linear in the number of calls.
    """
    newest = list(reversed(calls))
    found, border = 0, 0
    borders = [0] * len(newest)
    for i in range(1, len(newest)):
        call = newest[i]
        while border and newest[border] != call:
            border = borders[border - 1]
        if newest[border] == call:
            border += 1
        borders[i] = border
        length = i + 1
        period = length - border
        if length >= REPEATED * period and 2 * length >= len(newest):
            found = period
    return found
