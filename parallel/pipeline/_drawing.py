"""Timelines as text and as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parallel._core.pipeline.simulation import Timing
from parallel._core.pipeline.table import Kind

COLOURS: dict[Kind, str] = {
    Kind.FORWARD: "#4878b0",
    Kind.BACKWARD: "#e0a03c",
    Kind.INPUT: "#c8553d",
    Kind.WEIGHT: "#6aa56e",
}
_NAMES: dict[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradients of weights",
}


def text(timing: Timing, unit: float = 1.0) -> str:
    """Return a line a rank: what it does in each ``unit`` of time, ``.`` where it idles.

    An action is written where it begins; ``-`` means that it goes on.
    """
    columns = max(1, round(timing.makespan / unit))
    cells = [["."] * columns for _ in range(timing.ranks)]
    alone = len({span.action.stage for span in timing.spans}) == timing.ranks
    for span in timing.spans:
        # As tables write it; without the stage, where each rank has one.
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
    """Write a picture of timelines, one below the other: such as planned and measured.

    Args:
        file: where to; its suffix says in which format.
        timings: by their titles, the first at the top.

    Raises:
        ImportError: without matplotlib.
        OSError: when the file cannot be written.
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
    handles = [Patch(color=COLOURS[kind], label=_NAMES[kind]) for kind in Kind if kind in kinds]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False)
    figure.savefig(file, dpi=120)
