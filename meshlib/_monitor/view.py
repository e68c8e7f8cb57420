"""``JobView``: the known state of a running job, for the terminal, the page and the metrics.

Its input is the job's events and its ranks' samples, each with the time at which it was read
(seconds since 1970).
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshlib._diagnosis.sampling.sample import Sample
from meshlib._events.events import (
    Abort,
    Agreed,
    JobEvent,
    Leave,
    RankEnded,
    RankLost,
    Ready,
)
from meshlib._monitor.shares import DimShare, Smooth, Straggler, dim_shares, stragglers
from meshlib._plain_text import first_of

SILENT_SECONDS = 4.0
"""The age of the last sample from which a rank is silent; ranks post one each second."""
STUCK_SECONDS = 3.0
"""The time in one call from which a rank is waiting."""
_HISTORY = 600
_NOTES = 200


class State(enum.StrEnum):
    """The state of a rank.

    A computing rank is outside of calls; a waiting one has been in one call for ``STUCK_SECONDS``.
    A spare rank waits for a place in the job, and an absent one has not joined. A silent rank posts
    no samples. A rank that left did so in good order.
    """

    COMPUTING = "computing"
    CALLING = "in a call"
    WAITING = "waiting"
    SPARE = "spare"
    ABSENT = "absent"
    SILENT = "silent"
    LOST = "lost"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about the job at ``time``; ``kind`` is a word such as ``lost``."""

    time: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Moment:
    """The job at ``time``, for its history.

    ``ranks`` counts the present ranks. ``step`` is the median time of a step in seconds, 0 if
    unknown. ``waiting`` is the ranks' mean share of time spent waiting, from 0 to 1.
    ``bandwidth`` is that of all ranks' calls, in bytes per second.
    """

    time: float
    ranks: int
    step: float
    waiting: float
    bandwidth: float


class RankView:
    """One rank: its last ``sample``, read at ``sampled_at``, and its ``smooth`` shares."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sample: Sample | None = None
        self.sampled_at: float = 0.0
        self.taken: int = 0
        """The number of samples so far."""
        self.smooth: Smooth = Smooth()
        self.ended: State | None = None
        """``LOST`` or ``LEFT``, once the rank is gone."""
        self.how: str = ""
        """The end of the rank, a phrase that completes "rank 1 …"."""
        self.vague: bool = False
        """True if a later event may have the reason of the loss."""
        self.lost_at: float = 0.0
        self.spare: bool = False

    def take(self, sample: Sample, at: float) -> None:
        """Add the rank's last sample, unless it is known."""
        if self.sample is not None and (sample.number, sample.pid) == (
            self.sample.number,
            self.sample.pid,
        ):
            return
        self.sample, self.sampled_at = sample, at
        self.taken += 1
        self.smooth.take(sample)

    def state(self, now: float) -> State:
        """Return the state of the rank at the time ``now``."""
        sample = self.sample
        if self.ended is not None:
            return self.ended
        if sample is None:
            return State.SPARE if self.spare else State.ABSENT
        if now - self.sampled_at > SILENT_SECONDS:
            return State.SILENT
        if sample.place < 0 and self.spare:
            return State.SPARE
        blocking = [sample.age(call) for call in sample.open_calls if call.blocking]
        if not blocking:
            return State.COMPUTING
        return State.WAITING if max(blocking) > STUCK_SECONDS else State.CALLING

    @property
    def step(self) -> float:
        """The duration of a step in seconds, 0 if unknown."""
        sample = self.sample
        return sample.step.seconds if sample is not None and sample.step is not None else 0.0


class JobView:
    """The known state of the job ``name``. Only one thread may use it at a time."""

    def __init__(self, name: str = "", size: int = 0) -> None:
        self.name: str = name
        self.size: int = size
        """The number of ranks at the job's start, 0 if unknown."""
        self.epoch: int = 0
        self.committed: int = -1
        """The number of steps that the ranks' loops have committed, -1 if they do not report it."""
        self.ranks: dict[int, RankView] = {}
        self.notes: deque[Note] = deque(maxlen=_NOTES)
        self.history: deque[Moment] = deque(maxlen=_HISTORY)
        self.dims: Sequence[DimShare] = ()
        """The ranks' waiting and traffic, by mesh dim or other group."""
        self.stragglers: Sequence[Straggler] = ()
        """The ranks that the others wait for, the slowest first."""
        self.over: str | None = None
        """The job's outcome, once it has ended."""
        self._members: frozenset[int] = frozenset()
        self._expect(size)

    def begin(self, why: str, at: float) -> None:
        """Forget the ranks, which begin again: after a restart, or with another process group."""
        if self.ranks and any(view.sample for view in self.ranks.values()):
            self._note(at, "begin", why)
        self.ranks = {}
        self.epoch, self.committed = 0, -1
        self._members = frozenset()
        self._expect(self.size)

    def end(self, how: str, at: float) -> None:
        """Record that the job is over, or can no longer be watched."""
        if self.over is None:
            self.over = how
            self._note(at, "end", how)

    def on_event(self, event: JobEvent, at: float) -> None:
        """Apply an event of the job's log."""
        match event:
            case RankLost(rank, how, vague):
                self._lose(rank, how, vague, at)
            case RankEnded(rank, how):
                self._gone(rank, State.LEFT, how, at)
            case Leave(rank=rank):
                self._gone(rank, State.LEFT, "has left in good order", at)
            case Ready(rank):
                self._wait_for_place(self._rank(rank), at)
            case Agreed(name, text) if name.startswith("epoch/") and text != "null":
                self._begin_epoch(int(name.removeprefix("epoch/")), json.loads(text), at)
            case Abort(message=message):
                first, _, _ = message.partition("\n")
                self._note(at, "failure", first)
            case _:
                pass

    def take(self, sample: Sample, at: float) -> None:
        """Apply the sample of a rank."""
        view = self._rank(sample.rank)
        first = view.sample is None
        view.take(sample, at)
        if first:
            self._expect(sample.size if sample.place >= 0 else 0)
            if len([v for v in self.ranks.values() if v.sample]) > self.size:
                self._note(at, "join", f"rank {sample.rank} has joined, on {sample.host}")
        self.epoch = max(self.epoch, sample.epoch)
        if sample.step is not None:
            self.committed = max(self.committed, sample.step.committed)

    def tick(self, now: float) -> None:
        """Compare the ranks, after ``take`` has been called for all samples."""
        there = self.there(now)
        silent = [v.smooth for v in self.ranks.values() if v.state(now) == State.SILENT]
        self.dims = dim_shares([(v.rank, v.smooth) for v in there], silent)
        self.stragglers = stragglers([(v.rank, v.smooth) for v in there])
        steps = sorted(view.step for view in there if view.step)
        if there:
            self.history.append(
                Moment(
                    time=now,
                    ranks=len(there),
                    step=steps[len(steps) // 2] if steps else 0.0,
                    waiting=sum(dim.waiting for dim in self.dims),
                    bandwidth=sum(dim.bandwidth for dim in self.dims),
                )
            )

    def there(self, now: float) -> list[RankView]:
        """Return the ranks that have a place in the job and are not silent, by rank."""
        gone = (State.ABSENT, State.SILENT, State.SPARE, State.LOST, State.LEFT)
        return [view for view in self.ordered() if view.state(now) not in gone]

    @property
    def slow(self) -> frozenset[int]:
        """The stragglers' ranks."""
        return frozenset(one.rank for one in self.stragglers)

    def ordered(self) -> list[RankView]:
        """Return all known ranks, by rank."""
        return [self.ranks[rank] for rank in sorted(self.ranks)]

    # ------------------------------------------------------------------ events

    def _expect(self, size: int) -> None:
        if not any(view.ended for view in self.ranks.values()):
            for rank in range(size):
                self._rank(rank)
        self.size = max(self.size, size)

    def _rank(self, rank: int) -> RankView:
        return self.ranks.setdefault(rank, RankView(rank))

    def _gone(self, rank: int, ended: State, how: str, at: float) -> None:
        view = self._rank(rank)
        if view.ended is None:
            view.ended, view.how = ended, how
            self._note(at, ended, f"rank {rank} {how}")

    def _lose(self, rank: int, how: str, vague: bool, at: float) -> None:
        view = self._rank(rank)
        if view.ended == State.LOST and view.vague and not vague:  # this event gives the reason
            worse = Note(view.lost_at, State.LOST, f"rank {rank} {view.how}")
            if worse in self.notes:
                self.notes[self.notes.index(worse)] = replace(worse, text=f"rank {rank} {how}")
            view.how, view.vague = how, False
        elif view.ended is None:
            view.vague, view.lost_at = vague, at
            self._gone(rank, State.LOST, how, at)

    def _wait_for_place(self, view: RankView, at: float) -> None:
        if not view.spare and view.rank not in self._members:
            view.spare = True
            self._note(at, "ready", f"rank {view.rank} waits for a place")

    def _begin_epoch(self, number: int, agreed: dict[str, list[int]], at: float) -> None:
        if number <= self.epoch:
            return
        self.epoch = number
        members = agreed["members"]
        self._members = frozenset(members)
        for rank in members:
            self._rank(rank).spare = False
        text = f"epoch {number} has begun, with {len(members)} ranks: {first_of(members)}"
        self._note(at, "epoch", text)

    def _note(self, at: float, kind: str, text: str) -> None:
        self.notes.append(Note(at, kind, text))
