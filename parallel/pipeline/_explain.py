"""The schedule of a pipeline: its table, its bubble, the activations that it holds."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from parallel._core.pipeline.messages import message_of
from parallel._core.pipeline.named import get_schedule_class
from parallel._core.pipeline.simulation import USUAL_COSTS, Costs, most_held, simulate
from parallel._core.pipeline.table import Kind, Table
from parallel.pipeline._drawing import draw, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedule, its size, and its costs, for ``meshlib explain schedule``."""
    add = parser.add_argument
    add("schedule", metavar="NAME", help="such as 1F1B, or a .csv file")
    add("--stages", type=int, metavar="N", help="parts of the model")
    add("--microbatches", type=int, metavar="N", help="parts of a batch")
    add("--ranks", type=int, metavar="N", help="(default: as the schedule says)")
    add("--costs", metavar="TIMES", help="of actions (default: F=1,B=2,I=1,W=1)")
    add("--message", type=float, default=0.0, metavar="TIME", help="of a message")
    add("--picture", metavar="FILE", help="draw it, too; needs matplotlib")


def explain(given: argparse.Namespace) -> str:
    """Return the text for the arguments."""
    return explain_schedule(
        given.schedule,
        given.stages,
        given.microbatches,
        given.ranks,
        given.costs,
        given.message,
        given.picture,
    )


def explain_schedule(
    schedule: str,
    stages: int | None,
    microbatches: int | None,
    ranks: int | None = None,
    costs: str | None = None,
    message: float = 0.0,
    picture: str | None = None,
) -> str:
    """Return the text for a schedule by its name, or for a table in a CSV file.

    Args:
        schedule: the name, as ``get_schedule_class`` takes it, or a file that ends in ``.csv``.
        stages: how many stages; a file says it itself.
        microbatches: how many microbatches; a file says it itself.
        ranks: how many ranks have the stages; by default one each for GPipe, 1F1B and the eager
            one, half as many for the others.
        costs: what actions take: ``F=1,B=2,I=1,W=1``, any of them.
        message: what a message between ranks takes.
        picture: a file to draw the timeline into.

    Returns:
        The text, several lines.

    Raises:
        ValueError: for a schedule that there is not, or that cannot be made so.
        OSError: for a file that cannot be read or written.
        ImportError: for a picture without matplotlib.
    """
    table = _table(schedule, stages, microbatches, ranks)
    timing = simulate(table, _costs(costs), message)
    if picture is not None:
        draw(picture, {table.name: timing})
    unit = min(span.end - span.begin for span in timing.spans)
    count = len(table.ranks)
    sent = Counter(
        rank
        for rank, actions in enumerate(table.ranks)
        for action in actions
        if (given := message_of(action, table)) and table.rank_of[given.stage] != rank
    )
    held = most_held(table)
    each = table.stages // count
    lines = [
        f"{table.name}: {table.stages} stages on {count} ranks, {table.microbatches} microbatches",
        "",
        text(timing, unit),
        f"time    {timing.makespan:g}; a rank computes {timing.makespan - timing.idle(0):g} of it",
        f"bubble  {timing.bubble:.1%} of the ranks' time",
        "held    activations of at most "
        + ", ".join(f"{held[rank] / each:g}" for rank in range(count))
        + " microbatches (of all stages) on ranks 0, 1, ...",
        "sends   " + ", ".join(str(sent[rank]) for rank in range(count)) + " messages a step",
    ]
    return "\n".join(lines) + "\n"


def _table(schedule: str, stages: int | None, microbatches: int | None, ranks: int | None) -> Table:
    if schedule.endswith(".csv"):
        if not stages is microbatches is ranks is None:
            raise ValueError(f"{schedule} says how many stages, microbatches and ranks there are")
        return Table.from_csv(Path(schedule))
    kind = get_schedule_class(schedule)
    if stages is None or microbatches is None:
        raise ValueError(f"{schedule} needs --stages and --microbatches")
    if ranks is None:
        ranks = stages if kind.stages_per_rank == 1 else max(1, stages // 2)
    each, rest = divmod(stages, max(1, ranks))
    if ranks < 1 or rest or not each:
        raise ValueError(f"{stages} stages do not divide by {ranks} ranks")
    return kind.make_table(ranks, microbatches, each)


def _costs(given: str | None) -> Costs:
    costs = dict(USUAL_COSTS)
    for part in given.split(",") if given else ():
        kind, _, number = part.partition("=")
        try:
            costs[Kind(kind.strip())] = float(number)
        except ValueError:
            raise ValueError(f"--costs expects such as F=1,B=2,I=1,W=1, got {part!r}") from None
    return costs
