"""Simulated times of a table's actions for given costs, and the ranks' idle time."""

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
"""Costs in matrix products: one forward, and one for each of the two gradients."""


@dataclass(frozen=True)
class ActionSpan:
    """An action of a rank, from ``begin`` to ``end``."""

    rank: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timing:
    """The actions' times: simulated (``simulate``) or measured (``PipelineSchedule.timeline``)."""

    ranks: int
    spans: tuple[ActionSpan, ...]

    @property
    def begin(self) -> float:
        """The time at which the first action begins."""
        return min(span.begin for span in self.spans)

    @property
    def makespan(self) -> float:
        """The time from the beginning of the first action to the end of the last."""
        return max(span.end for span in self.spans) - self.begin

    @property
    def bubble(self) -> float:
        """The fraction of the ranks' time, from 0 to 1, in which they are idle."""
        busy = sum(span.end - span.begin for span in self.spans)
        return 1 - busy / (self.ranks * self.makespan)

    def idle(self, rank: int) -> float:
        """Return the idle time of one rank."""
        busy = sum(span.end - span.begin for span in self.spans if span.rank == rank)
        return self.makespan - busy


def simulate(table: ScheduleTable, costs: Costs | None = None, message: float = 0.0) -> Timing:
    """Return the actions' times if each rank begins each action as soon as possible.

    Args:
        table: The schedule.
        costs: The time of each action, by kind or by a function of the action. Default: 1 for a
            forward, 2 for a backward, 1 for each half of a backward.
        message: The time from the end of an action until another rank has its result.

    Returns:
        The spans, from 0, in the unit of the costs.

    Raises:
        ValueError: For costs that are not positive.
    """
    costs = USUAL_COSTS if costs is None else costs
    ends: dict[Action, float] = {}
    free = [0.0] * len(table.ranks)
    spans: list[ActionSpan] = []
    for rank, action in table.in_time():
        begin = free[rank]
        for need in table.needs(action):
            away = table.rank_of[need.stage] != rank
            begin = max(begin, ends[need] + (message if away else 0.0))
        cost = costs(action) if callable(costs) else costs[action.kind]
        if not cost > 0:
            raise ValueError(f"{table.name}: the cost of {action} is {cost}; expected above 0")
        ends[action] = free[rank] = begin + cost
        spans.append(ActionSpan(rank, action, begin, free[rank]))
    return Timing(len(table.ranks), tuple(spans))


def most_held(table: ScheduleTable) -> list[int]:
    """Return for each rank the maximum number of microbatches whose activations it holds.

    The numbers are sums over the rank's stages. A stage holds a microbatch's activations from the
    forward until the end of the backward (or of its second half).
    """
    change = {
        ActionKind.FORWARD: 1,
        ActionKind.BACKWARD: -1,
        ActionKind.INPUT: 0,
        ActionKind.WEIGHT: -1,
    }
    return [max(accumulate(change[a.kind] for a in actions)) for actions in table.ranks]
