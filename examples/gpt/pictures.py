"""How a run went, drawn: its losses, and its pipeline's timeline beside the planned one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from parallel.pipeline import Action, Kind, Table, Timing, simulate

COLOURS = {
    Kind.FORWARD: "tab:blue",
    Kind.BACKWARD: "tab:orange",
    Kind.INPUT: "tab:orange",
    Kind.WEIGHT: "tab:green",
}


def draw_losses(losses: list[float], title: str, path: Path) -> None:
    """Draw the losses into a PNG."""
    figure, (axes,) = _figure(1)
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="nats a character", title=title)
    _save(figure, path)


def planned(table: Table, measured: Timing) -> Timing:
    """Return when the actions of ``table`` would run if each took what its kind takes on average.

    On its stage; messages take no time.
    """
    times: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in measured.spans:
        times[span.action.stage, span.action.kind].append(span.end - span.begin)

    def cost(action: Action) -> float:
        some = times[action.stage, action.kind]
        return sum(some) / len(some)

    return simulate(table, cost)


def draw_timelines(table: Table, measured: Timing, path: Path) -> None:
    """Draw a step of the pipeline into a PNG: as planned above, as measured below."""
    figure, both = _figure(2)
    for axes, title, timing in zip(
        both, ("planned", "measured"), (planned(table, measured), measured), strict=True
    ):
        for span in timing.spans:
            begin, width = (span.begin - timing.begin) * 1e3, (span.end - span.begin) * 1e3
            axes.barh(
                span.rank, width, left=begin, color=COLOURS[span.action.kind], edgecolor="white"
            )
            axes.text(
                begin + width / 2, span.rank, str(span.action), ha="center", va="center", fontsize=6
            )
        axes.set_yticks(range(timing.ranks))
        axes.invert_yaxis()
        axes.set(ylabel="rank of pp", title=f"{title}: bubble {timing.bubble:.0%}")
    both[-1].set_xlabel("milliseconds")
    _save(figure, path)


def _figure(rows: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4 if rows == 1 else 5), layout="constrained")
    axes = figure.subplots(rows, sharex=True, squeeze=False)
    return figure, list(axes[:, 0])


def _save(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)
