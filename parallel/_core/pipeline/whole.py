"""Schedules whose backward is one action: GPipe, 1F1B, eager and interleaved 1F1B."""

from __future__ import annotations

from parallel._checks import to_count
from parallel._core.pipeline.table import Action, Kind, Table

_F, _B = Kind.FORWARD, Kind.BACKWARD


def gpipe(ranks: int, microbatches: int) -> Table:
    """Return GPipe: all forwards, then all backwards.

    Huang et al., "GPipe", arXiv:1811.06965, section 2. A rank idles for (p-1)/(m+p-1) of the time
    and holds the activations of all m microbatches.

    Raises ValueError for counts below 1, TypeError for what is no whole number.
    """
    check_counts(ranks=ranks, microbatches=microbatches)
    rows = [
        [Action(rank, kind, i) for kind in (_F, _B) for i in range(microbatches)]
        for rank in range(ranks)
    ]
    return Table(tuple(map(tuple, rows)), "GPipe")


def one_f_one_b(ranks: int, microbatches: int) -> Table:
    """Return 1F1B: after a warm-up, a forward and a backward in turn.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", arXiv:2006.09503, section
    3 (PipeDream-Flush). The bubble of GPipe, and activations of p microbatches at most.

    Raises ValueError for counts below 1, TypeError for what is no whole number.
    """
    return _one_stage_each("1F1B", ranks, microbatches, warm=1)


def eager_1f1b(ranks: int, microbatches: int) -> Table:
    """Return 1F1B with a warm-up twice as long, so that messages have time to pass.

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", arXiv:2211.05322: in
    1F1B each rank needs, as soon as it has computed, what another has computed just then, and waits
    for a message with each microbatch; here it was computed a microbatch earlier. Where a message
    takes c, up to half of a microbatch's forward and backward, a step takes 2(p-1)c longer than
    with none, however many microbatches there are. Rank r holds 2(p-r)-1 activations.

    Raises ValueError for counts below 1, TypeError for what is no whole number.
    """
    return _one_stage_each("eager 1F1B", ranks, microbatches, warm=2)


def _one_stage_each(name: str, ranks: int, microbatches: int, warm: int) -> Table:
    """Return 1F1B, with ``warm`` more forwards before the first backward than the next rank."""
    check_counts(ranks=ranks, microbatches=microbatches)
    rows: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        forwards = [Action(rank, _F, i) for i in range(microbatches)]
        backwards = [Action(rank, _B, i) for i in range(microbatches)]
        rows.append(_in_turn(forwards, backwards, warm * (ranks - rank - 1)))
    return Table(tuple(rows), name)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Table:
    """Return 1F1B with several stages a rank: rank r has the stages r, r+p, r+2p, ...

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
    arXiv:2104.04473, section 2.2: the bubble is v times smaller, there are v times as many
    messages. Microbatches go through a rank's stages in rounds of p (or m, if that is less).

    Raises ValueError for counts below 1, and for microbatches that do not divide into rounds;
    TypeError for what is no whole number.
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
    return Table(tuple(rows), "interleaved 1F1B")


def _in_turn(forwards: list[Action], backwards: list[Action], warm: int) -> tuple[Action, ...]:
    """Return ``warm`` forwards, then a forward and a backward in turn, then what is left."""
    warm = min(warm, len(forwards))
    pairs = zip(forwards[warm:], backwards, strict=False)
    rest = backwards[len(forwards) - warm :]
    return (*forwards[:warm], *(action for pair in pairs for action in pair), *rest)


def check_counts(**counts: int) -> None:
    """Raise ValueError for the first of ``counts`` below 1, TypeError for no whole number."""
    for name, value in counts.items():
        to_count(value, name)


def rounds_of(microbatches: int, ranks: int, name: str) -> list[range]:
    """Return the rounds in which microbatches go through a rank's stages: of ``ranks`` each.

    If there are fewer, all are one round. Raises ValueError when they do not divide.
    """
    count = max(1, microbatches // ranks)
    if microbatches % count:
        raise ValueError(
            f"microbatches is {microbatches}, which does not divide into the {count} rounds of "
            f"{name} on {ranks} ranks; expected at most {ranks}, or a multiple of it"
        )
    width = microbatches // count
    return [range(i * width, (i + 1) * width) for i in range(count)]
