"""When each action of a table runs, for given costs; and how long ranks idle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from parallel._core.pipeline.table import Action, ActionKind, ScheduleTable

Costs = Mapping[ActionKind, float] | Callable[[Action], float]
"""The time of an action: by its kind, or a function of the action."""

USUAL_COSTS: dict[ActionKind, float] = {
    ActionKind.FORWARD: 1.0,
    ActionKind.BACKWARD: 2.0,
    ActionKind.INPUT: 1.0,
    ActionKind.WEIGHT: 1.0,
}
"""A matrix product forward, and one for each of its two gradients."""


@dataclass(frozen=True)
class ActionSpan:
    """An action of a rank, from ``begin`` to ``end``."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timing:
    """When each action runs: planned (``simulate``) or measured (``PipelineSchedule.timeline``)."""

    ranks: int
    spans: tuple[ActionSpan, ...]

    @property
    def begin(self) -> float:
        """When the first rank begins."""
        return min(span.begin for span in self.spans)

    @property
    def makespan(self) -> float:
        """The time from the beginning of the first action to the end of the last."""
        return max(span.end for span in self.spans) - self.begin

    @property
    def bubble(self) -> float:
        """The share of the ranks' time, from 0 to 1, in which they compute nothing."""
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / (self.ranks * self.makespan)

    def idle(self, rank: int) -> float:
        """Return how long one rank computes nothing."""
        busy = sum(span.end - span.begin for span in self.spans if span.rank == rank)
        return self.makespan - busy


def simulate(table: ScheduleTable, costs: Costs | None = None, message: float = 0.0) -> Timing:
    """Return when each action runs if each rank begins each of its actions as soon as it can.

    Args:
        table: The schedule.
        costs: The time of each action, by kind or by a function of the action; by default a forward
            1, a backward 2, either half of one 1.
        message: The time from the end of an action until another rank has its result.

    Returns:
        The spans, in the unit of the costs, from 0 on.

    Raises:
        ValueError: For costs that are not positive.
    """
    given = USUAL_COSTS if costs is None else costs
    ends: dict[Action, float] = {}
    free = [0.0] * len(table.ranks)
    spans: list[ActionSpan] = []
    for rank, action in table.in_time():
        begin = free[rank]
        for need in table.needs(action):
            away = table.rank_of[need.stage] != rank
            begin = max(begin, ends[need] + (message if away else 0.0))
        takes = given(action) if callable(given) else given[action.kind]
        if not takes > 0:
            raise ValueError(f"{table.name}: the cost of {action} is {takes}; expected above 0")
        ends[action] = free[rank] = begin + takes
        spans.append(ActionSpan(rank, action, begin, free[rank]))
    return Timing(len(table.ranks), tuple(spans))


def most_held(table: ScheduleTable) -> list[int]:
    """Return for each rank how many microbatches' activations it holds at most, over its stages.

    From their forward until their backward (or its second half) has ended.
    """
    change = {
        ActionKind.FORWARD: 1,
        ActionKind.BACKWARD: -1,
        ActionKind.INPUT: 0,
        ActionKind.WEIGHT: -1,
    }
    return [max(accumulate(change[a.kind] for a in actions)) for actions in table.ranks]
