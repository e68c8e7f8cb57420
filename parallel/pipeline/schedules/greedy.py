"""Tables made by running them: each rank does the most urgent action that is ready.

How Qi et al. build their schedules by heuristics ("Zero Bubble Pipeline Parallelism",
arXiv:2401.10241, section 3.2): forwards as far as memory lets them, gradients of inputs as soon as
they can be, gradients of weights where there would be a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallel.pipeline.tables.actions import Action, Kind
from parallel.pipeline.tables.table import Table

_F, _I, _W = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT

Urgency = Callable[[Action], int]
"""Of two actions that are ready, the one with the smaller value is done."""


class _Rank:
    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.row: list[Action] = []
        self.next = {(stage, kind): 0 for stage in stages for kind in (_F, _I, _W)}
        self.free_at = 0

    @property
    def held(self) -> int:
        return sum(self.next[stage, _F] - self.next[stage, _W] for stage in self.stages)


def fill(
    placed: Sequence[Sequence[int]],
    microbatches: int,
    limit: int,
    urgency: Urgency,
    name: str,
) -> Table:
    """Return the table of ranks that each do, at each moment, the most urgent action there is.

    Each of F, I and W takes one unit of time. A rank begins no forward with which it would hold
    the activations of more microbatches than its limit.

    Args:
        placed: the stages of each rank.
        microbatches: their number.
        limit: how many microbatches' activations, over its stages, a rank may hold.
        urgency: what is done first.
        name: that of the table.
    """
    ranks = [_Rank(stages) for stages in placed]
    last = max(stage for stages in placed for stage in stages)
    ends: dict[Action, int] = {}
    total = 3 * microbatches * (last + 1)
    now = 0
    while len(ends) < total:
        for rank in ranks:
            ready = [
                action
                for (stage, kind), i in rank.next.items()
                if i < microbatches
                for action in [Action(stage, kind, i)]
                if all(ends.get(need, now + 1) <= now for need in action.needs(last, True))
                and (kind is not _F or rank.held < limit)
            ]
            if rank.free_at <= now and ready:
                action = min(ready, key=urgency)
                rank.row.append(action)
                rank.next[action.stage, action.kind] += 1
                ends[action] = rank.free_at = now + 1
        now += 1
        assert now <= total + last + 1, "some rank can always go on"
    return Table(tuple(tuple(rank.row) for rank in ranks), name)
