"""Text and pictures that explain a pipeline schedule: its order, bubble and activations."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from parallel._core.pipeline.messages import message_of
from parallel._core.pipeline.named import get_schedule_class
from parallel._core.pipeline.simulation import USUAL_COSTS, Costs, Timing, most_held, simulate
from parallel._core.pipeline.table import ActionKind, ScheduleTable

COLOURS: dict[ActionKind, str] = {
    ActionKind.FORWARD: "#4878b0",
    ActionKind.BACKWARD: "#e0a03c",
    ActionKind.INPUT: "#c8553d",
    ActionKind.WEIGHT: "#6aa56e",
}
_NAMES: dict[ActionKind, str] = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "gradient of the input",
    ActionKind.WEIGHT: "gradients of weights",
}


def text(timing: Timing, unit: float = 1.0) -> str:
    """Return a line for each rank with its action in each ``unit`` of time.

    ``.`` means that the rank is idle, ``-`` that the last action continues.
    """
    columns = max(1, round(timing.makespan / unit))
    cells = [["."] * columns for _ in range(timing.ranks)]
    alone = len({span.action.stage for span in timing.spans}) == timing.ranks
    for span in timing.spans:
        # If each rank has one stage, the stage is redundant.
        short = f"{span.action.kind}{span.action.microbatch}" if alone else str(span.action)
        first = round((span.begin - timing.begin) / unit)
        last = max(first + 1, round((span.end - timing.begin) / unit))
        for column in range(first, min(last, columns)):
            cells[span.rank][column] = "-" if column > first else short
    width = max(len(cell) for row in cells for cell in row)
    number = len(str(timing.ranks - 1))
    return "".join(
        f"rank {rank:{number}}  {' '.join(cell.ljust(width) for cell in row)}".rstrip() + "\n"
        for rank, row in enumerate(cells)
    )


def draw(file: str | Path, timings: Mapping[str, Timing]) -> None:
    """Write a picture of timelines, such as a simulated and a measured one.

    Args:
        file: The target; its suffix determines the format.
        timings: The timelines by title, from top to bottom.

    Raises:
        ImportError: Without matplotlib.
        OSError: When the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"a picture needs matplotlib: {error}") from error
    tallest = sum(timing.ranks for timing in timings.values())
    figure = Figure(figsize=(12, 1.2 * len(timings) + 0.45 * tallest), layout="constrained")
    for axes, (title, timing) in zip(
        figure.subplots(len(timings), squeeze=False)[:, 0], timings.items(), strict=True
    ):
        for span in timing.spans:
            begin, length = span.begin - timing.begin, span.end - span.begin
            colour = COLOURS[span.action.kind]
            axes.broken_barh(
                [(begin, length)], (span.rank - 0.42, 0.84), facecolor=colour, edgecolor="white"
            )
            if length > 0.012 * timing.makespan:
                label = str(span.action.microbatch)
                axes.text(begin + length / 2, span.rank, label, ha="center", va="center", size=7)
        axes.set_yticks(range(timing.ranks), [f"rank {rank}" for rank in range(timing.ranks)])
        axes.set_ylim(timing.ranks - 0.5, -0.5)
        axes.set_xlim(0, timing.makespan)
        axes.set_title(f"{title}: {timing.bubble:.1%} bubble", loc="left", size=10)
    kinds = {span.action.kind for timing in timings.values() for span in timing.spans}
    handles = [
        Patch(color=COLOURS[kind], label=_NAMES[kind]) for kind in ActionKind if kind in kinds
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
    figure.savefig(file, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshlib explain schedule``."""
    add = parser.add_argument
    add("schedule", metavar="NAME", help="a name such as 1F1B, or a .csv file")
    add("--stages", type=int, metavar="N", help="number of stages of the model")
    add("--microbatches", type=int, metavar="N", help="number of microbatches of a batch")
    add("--ranks", type=int, metavar="N", help="number of ranks (default: from the schedule)")
    add("--costs", metavar="TIMES", help="times of actions (default: F=1,B=2,I=1,W=1)")
    add("--message", type=float, default=0.0, metavar="TIME", help="time of a message")
    add("--picture", metavar="FILE", help="also write a picture; needs matplotlib")


def explain(args: argparse.Namespace) -> str:
    """Return the text of ``meshlib explain schedule`` for these arguments.

    Raises ValueError for an unknown schedule, or numbers that it does not allow. Raises OSError
    for a file that cannot be read or written, ImportError for a picture without matplotlib.
    """
    table = _table(args.schedule, args.stages, args.microbatches, args.ranks)
    timing = simulate(table, _costs(args.costs), args.message)
    if args.picture is not None:
        draw(args.picture, {table.name: timing})
    unit = min(span.end - span.begin for span in timing.spans)
    count = len(table.ranks)
    sent = Counter(
        rank
        for rank, actions in enumerate(table.ranks)
        for action in actions
        if (message := message_of(action, table)) and table.rank_of[message.stage] != rank
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


def _table(
    schedule: str, stages: int | None, microbatches: int | None, ranks: int | None
) -> ScheduleTable:
    if schedule.endswith(".csv"):
        if not stages is microbatches is ranks is None:
            raise ValueError(f"{schedule} determines --stages, --microbatches and --ranks")
        return ScheduleTable.from_csv(Path(schedule))
    kind = get_schedule_class(schedule)
    if stages is None or microbatches is None:
        raise ValueError(f"{schedule} needs --stages and --microbatches")
    if ranks is None:
        ranks = stages if kind.stages_per_rank == 1 else max(1, stages // 2)
    each, rest = divmod(stages, max(1, ranks))
    if ranks < 1 or rest or not each:
        raise ValueError(f"{stages} stages cannot be divided among {ranks} ranks")
    return kind.make_table(ranks, microbatches, each)


def _costs(text: str | None) -> Costs:
    costs = dict(USUAL_COSTS)
    for part in text.split(",") if text else ():
        kind, _, number = part.partition("=")
        try:
            costs[ActionKind(kind.strip())] = float(number)
        except ValueError:
            raise ValueError(f"--costs must have the form F=1,B=2,I=1,W=1, got {part!r}") from None
    return costs
