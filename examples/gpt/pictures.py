"""How a run went, drawn: its losses, and its pipeline's timeline beside the planned one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from parallel.pipeline import Action, Kind, Table, Timing, draw, simulate


def draw_losses(losses: list[float], title: str, path: Path) -> None:
    """Draw the losses into a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="nats a character", title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


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
    draw(path, {"planned": planned(table, measured), "measured": measured})
