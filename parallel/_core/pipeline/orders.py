"""Functions that return schedules as tables.

The schedules are GPipe, 1F1B, eager 1F1B, interleaved 1F1B, ZB-H1 (also interleaved), ZB-V and
DualPipeV.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from parallel._checks import to_count
from parallel._core.pipeline.table import Action, ActionKind, ScheduleTable

_F, _B, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT


def gpipe(ranks: int, microbatches: int) -> ScheduleTable:
    """Return GPipe: all forwards, then all backwards.

    Huang et al., "GPipe", arXiv:1811.06965, section 2. A rank idles for (p-1)/(m+p-1) of the time
    and holds the activations of all m microbatches.

    Raises ValueError for counts below 1, TypeError for a count that is not an integer.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    rows = [
        [Action(rank, kind, i) for kind in (_F, _B) for i in range(microbatches)]
        for rank in range(ranks)
    ]
    return ScheduleTable(tuple(map(tuple, rows)), "GPipe")


def one_f_one_b(ranks: int, microbatches: int) -> ScheduleTable:
    """Return 1F1B: after a warm-up, alternating forwards and backwards.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", arXiv:2006.09503, section
    3 (PipeDream-Flush). The bubble is that of GPipe. A rank holds the activations of at most p
    microbatches.

    Raises ValueError for counts below 1, TypeError for a count that is not an integer.
    """
    return _one_stage_each("1F1B", ranks, microbatches, warm=1)


def eager_1f1b(ranks: int, microbatches: int) -> ScheduleTable:
    """Return 1F1B with a warm-up twice as long, which leaves more time for messages to arrive.

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", arXiv:2211.05322. In 1F1B
    each rank needs a result that another rank has only just computed, so it waits for a message in
    each microbatch. Here the other rank computed it one microbatch earlier. If a message takes time
    c, at most half of a microbatch's forward and backward, then messages lengthen a step by
    2(p-1)c, for any number of microbatches. Rank r holds the activations of 2(p-r)-1 microbatches.

    Raises ValueError for counts below 1, TypeError for a count that is not an integer.
    """
    return _one_stage_each("eager 1F1B", ranks, microbatches, warm=2)


def _one_stage_each(name: str, ranks: int, microbatches: int, warm: int) -> ScheduleTable:
    """Return 1F1B in which each rank starts with ``warm`` more forwards than the next rank."""
    check_counts(ranks=ranks, microbatches=microbatches)
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = [Action(rank, _F, i) for i in range(microbatches)]
        backwards = [Action(rank, _B, i) for i in range(microbatches)]
        rows.append(_in_turn(forwards, backwards, warm * (ranks - rank - 1)))
    return ScheduleTable(tuple(rows), name)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> ScheduleTable:
    """Return 1F1B with several stages per rank: rank r has the stages r, r+p, r+2p, ...

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
    arXiv:2104.04473, section 2.2. With v stages per rank, the bubble is v times smaller, and there
    are v times as many messages. Each rank runs its stages in rounds of p microbatches, or of m if
    that is less.

    Raises ValueError for counts below 1, and for microbatches that cannot be divided into rounds;
    TypeError for a count that is not an integer.
    """
    check_counts(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    groups = rounds_of(microbatches, ranks, "interleaved 1F1B")
    width = len(groups[0])
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        own = [rank + ranks * chunk for chunk in range(stages_per_rank)]
        forwards = [Action(stage, _F, i) for group in groups for stage in own for i in group]
        backwards = [Action(stage, _B, i) for group in groups for stage in own[::-1] for i in group]
        warm = (stages_per_rank - 1) * width + 2 * (ranks - rank - 1)
        rows.append(_in_turn(forwards, backwards, warm if stages_per_rank > 1 else warm // 2))
    return ScheduleTable(tuple(rows), "interleaved 1F1B")


def _in_turn(forwards: list[Action], backwards: list[Action], warm: int) -> tuple[Action, ...]:
    """Return ``warm`` forwards, then forward-backward pairs, then the remaining backwards."""
    warm = min(warm, len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    rest = backwards[len(forwards) - warm :]
    return (*forwards[:warm], *(action for pair in pairs for action in pair), *rest)


def check_counts(**counts: int) -> None:
    """Raise ValueError for the first count below 1, TypeError for one that is not an integer."""
    for name, value in counts.items():
        to_count(value, name)


def rounds_of(microbatches: int, ranks: int, name: str) -> list[range]:
    """Return the rounds of microbatches in which a rank runs its stages, of ``ranks`` each.

    Fewer than ``ranks`` microbatches are one round. Raises ValueError if the microbatches cannot
    be divided into equal rounds.
    """
    count = max(1, microbatches // ranks)
    if microbatches % count:
        raise ValueError(
            f"microbatches is {microbatches}, which is not divisible by the {count} rounds of "
            f"{name} on {ranks} ranks; expected at most {ranks}, or a multiple of it"
        )
    width = microbatches // count
    return [range(i * width, (i + 1) * width) for i in range(count)]


def zero_bubble(ranks: int, microbatches: int, stages_per_rank: int = 1) -> ScheduleTable:
    """Return ZB-H1: 1F1B that fills part of the bubble with gradients of weights.

    Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2.1. If F, I and W
    take the same time, the bubble is a third of that of 1F1B. Each rank holds the activations of at
    most p microbatches, like rank 0 in 1F1B. With v stages on each rank (r, r+p, r+2p, ...), the
    bubble is v times smaller, as in interleaved 1F1B.

    Raises ValueError for counts below 1, and for microbatches that cannot be divided into rounds
    (see ``interleaved_1f1b``); TypeError for a count that is not an integer.
    """
    check_counts(ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    rounds = rounds_of(microbatches, ranks, "zero bubble") if stages_per_rank > 1 else None
    groups = [range(microbatches)] if rounds is None else rounds
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        own = [rank + ranks * chunk for chunk in range(stages_per_rank)]
        forwards = deque(Action(s, _F, i) for group in groups for s in own for i in group)
        inputs = [Action(s, _I, i) for group in groups for s in own[::-1] for i in group]
        weights = deque(Action(s, _W, i) for s, _, i in inputs)
        warm = min((stages_per_rank - 1) * len(groups[0]) + ranks - rank - 1, len(forwards))
        row = [forwards.popleft() for _ in range(warm)]
        for number, action in enumerate(inputs):
            if forwards:
                row.append(forwards.popleft())
            row.append(action)
            # The first ``rank`` W are deferred to the end, where they fill this rank's bubble.
            if number >= rank:
                row.append(weights.popleft())
        rows.append((*row, *weights))
    return ScheduleTable(tuple(rows), "ZB-H1" if stages_per_rank == 1 else "interleaved ZB-H1")


def zbv(ranks: int, microbatches: int) -> ScheduleTable:
    """Return ZB-V: two stages per rank in the shape of a V. Rank r has stages r and 2p-1-r.

    The placement is from Qi et al., "Pipeline Parallelism with Controllable Memory",
    arXiv:2405.15362, section 3. The order comes from a simulation in which F, I and W take the same
    time. The memory is that of 1F1B; the bubble is the time to fill the pipeline once.

    Raises ValueError for counts below 1, TypeError for a count that is not an integer.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    last = 2 * ranks - 1

    def urgency(action: Action) -> int:
        if action.kind is _W:
            return 4
        back = action.stage >= ranks
        return int(back) if action.kind is _I else 3 - int(back)

    # Each action takes one unit of time, and each rank runs the most urgent ready action. Forwards
    # run as early as memory allows, gradients of inputs as soon as possible. Gradients of weights
    # fill the bubbles (Qi et al., arXiv:2401.10241, section 3.2).
    running = [_RankActions((rank, last - rank)) for rank in range(ranks)]
    ends: dict[Action, int] = {}
    total = 3 * microbatches * (last + 1)
    now = 0
    while len(ends) < total:
        for rank in running:
            ready = [
                action
                for (stage, kind), i in rank.next.items()
                if i < microbatches
                for action in [Action(stage, kind, i)]
                if all(ends.get(need, now + 1) <= now for need in action.needs(last, True))
                and (kind is not _F or rank.held < 2 * ranks)
            ]
            if rank.free_at <= now and ready:
                action = min(ready, key=urgency)
                rank.row.append(action)
                rank.next[action.stage, action.kind] += 1
                ends[action] = rank.free_at = now + 1
        now += 1
        assert now <= total + last + 1, "some rank can always continue"
    return ScheduleTable(tuple(tuple(rank.row) for rank in running), "ZB-V")


class _RankActions:
    def __init__(self, stages: Sequence[int]) -> None:
        self.stages = stages
        self.row: list[Action] = []
        self.next = {(stage, kind): 0 for stage in stages for kind in (_F, _I, _W)}
        self.free_at = 0

    @property
    def held(self) -> int:
        return sum(self.next[stage, _F] - self.next[stage, _W] for stage in self.stages)


def dual_pipe_v(ranks: int, microbatches: int) -> ScheduleTable:
    """Return DualPipeV: stages placed as in ZB-V, with forwards and backwards in pairs.

    The pairs are those of DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437,
    section 3.2.1). A device may overlap the actions of a pair; here they run in sequence. The V
    shape is Qi et al.'s half of DualPipe. Backward is split into I and W at the start and the end
    of a step, and whole in between.

    Raises ValueError for fewer than two microbatches per rank and for counts below 1, TypeError for
    a count that is not an integer.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ValueError(
            f"microbatches is {microbatches}; DualPipeV on {ranks} ranks expects at least "
            f"{2 * ranks}, two per rank"
        )
    return ScheduleTable(
        tuple(_DualRank(rank, ranks).row(microbatches) for rank in range(ranks)), "DualPipeV"
    )


class _DualRank:
    """A builder of one rank's row of DualPipeV. Side 0 is the stage in the first half of the V."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._stages = rank, 2 * ranks - 1 - rank
        self._next = {(side, kind): 0 for side in (0, 1) for kind in (_F, _B)}
        self._row: list[Action] = []
        self._weights: deque[Action] = deque()

    def row(self, microbatches: int) -> tuple[Action, ...]:
        """Return all actions, in order."""
        first, behind = self._rank + 1, self._ranks - self._rank - 1
        for _ in range(2 * behind):
            self._do(_F, 0)
        for _ in range(first):
            self._do(_F, 0)
            self._do(_F, 1)
        for _ in range(behind):
            self._do(_I, 1)
            self._row.append(self._weights.popleft())
            self._do(_F, 1)
        for _ in range(microbatches - 2 * self._ranks + first):
            self._do(_F, 0)
            self._do(_B, 1)
            self._do(_F, 1)
            self._do(_B, 0)
        for _ in range(behind):
            self._do(_B, 1)
            self._do(_F, 1)
            self._do(_B, 0)
        # In the second half of this loop, only gradients of weights remain to fill bubbles.
        for number in range(2 * first):
            self._do(_B if number < first else _I, 1 - number % 2)
        for _ in range(behind):
            if self._weights:
                self._row.append(self._weights.popleft())
            self._do(_I, 0)
        return (*self._row, *self._weights)

    def _do(self, kind: ActionKind, side: int) -> None:
        """Add the next action of this kind. An I adds its W to ``_weights``."""
        counted = _F if kind is _F else _B
        stage, number = self._stages[side], self._next[side, counted]
        self._next[side, counted] = number + 1
        self._row.append(Action(stage, kind, number))
        if kind is _I:
            self._weights.append(Action(stage, _W, number))
