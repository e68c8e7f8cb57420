"""From measured times to the numbers of a tuning table. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np


def crossover(sizes: Sequence[int], below: Sequence[float], above: Sequence[float]) -> int:
    """Return the size up to which the first of two algorithms is used.

    ``below`` and ``above`` are the seconds of the two at ``sizes`` (rising). The threshold is the
    one that loses least against always taking the faster algorithm. The loss is the sum of the
    logarithms of the ratios, so noise at one size does not decide. 0 means that the first one is
    never used.
    """
    if not len(sizes) == len(below) == len(above) > 0:
        raise ValueError(
            "expected as many times of both as sizes, and some, got "
            f"{len(sizes)} sizes, {len(below)} and {len(above)} times"
        )
    _check_positive("below", below)
    _check_positive("above", above)
    ratios = [log(first / second) for first, second in zip(below, above, strict=True)]
    # Losses by how many sizes are below the threshold.
    losses = [
        sum(max(ratio, 0) for ratio in ratios[:count])
        + sum(max(-ratio, 0) for ratio in ratios[count:])
        for count in range(len(sizes) + 1)
    ]
    best = losses.index(min(losses))
    return sizes[best - 1] if best else 0


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (alpha, beta), both positive, with ``seconds`` ≈ alpha + beta · ``sizes``.

    Least squares of the relative errors, so that small sizes count as much as large ones.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(f"expected times of at least two sizes, got {sizes} and {seconds}")
    _check_positive("seconds", seconds)
    times = np.asarray(seconds)
    beta = max(float(np.polyfit(sizes, times, 1, w=1 / times)[0]), 1e-15)
    alpha = np.average(times - beta * np.asarray(sizes), weights=times**-2.0)
    return max(float(alpha), 1e-12), beta


def _check_positive(name: str, seconds: Sequence[float]) -> None:
    """Relative errors and ratios are none of a time that is 0."""
    if not all(time > 0 for time in seconds):
        raise ValueError(f"{name} must be times above 0, got {list(seconds)}")


def best_of(seconds: dict[int, float], usual: int, margin: float = 0.03) -> int:
    """Return the key of the least time, but ``usual`` unless that is better by ``margin``."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < seconds[usual] * (1 - margin) else usual
