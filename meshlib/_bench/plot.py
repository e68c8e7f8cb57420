"""A plot of times over sizes: a log-log panel for each case and number of ranks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshlib._bench.cases import COPY
from meshlib._bench.libraries import OWN
from meshlib._bench.run import CaseResult

_COLUMNS = 4


def check_can_plot(file: Path) -> None:
    """Raise ValueError if ``file`` is not the name of a picture, or matplotlib is missing."""
    if file.suffix.lower() not in {".png", ".svg", ".pdf"}:
        raise ValueError(f"--plot: expected a .png, .svg or .pdf file, got {str(file)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install 'meshlib-spmd[examples]' has it")


def plot(results: Sequence[CaseResult], file: Path) -> None:
    """Draw the medians of all cases with sizes into ``file``."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    sized = [result for result in results if result.nbytes > 0 and result.case != COPY]
    panels = list(dict.fromkeys((result.case, result.ranks) for result in sized))
    libraries = list(dict.fromkeys(result.library for result in sized))
    columns = max(1, min(_COLUMNS, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.5 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (case, ranks) in zip(axes.flat, panels, strict=False):
        for number, library in enumerate(libraries):
            points = sorted(
                (result.nbytes, 1e6 * result.median)
                for result in sized
                if (result.case, result.ranks, result.library) == (case, ranks, library)
            )
            if points:
                style = "o-" if library in OWN else "s--"
                axis.loglog(*zip(*points, strict=True), style, color=f"C{number}", label=library)
        axis.set(title=f"{case}, {ranks} ranks", xlabel="bytes", ylabel="µs")
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
