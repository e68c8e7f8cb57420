"""Computation of a tuning table's numbers from measured times. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np


def crossover(sizes: Sequence[int], below: Sequence[float], above: Sequence[float]) -> int:
    """Return the largest size at which to use the first of two algorithms, 0 for never.

    ``below`` and ``above`` are the seconds of the two at the rising ``sizes``. The result loses
    least time compared with always using the faster algorithm. The loss is the sum of the
    logarithms of the ratios, so noise at one size does not decide.
    """
    if not len(sizes) == len(below) == len(above) > 0:
        raise ValueError(
            "expected one time of each algorithm for each size, at least one size, got "
            f"{len(sizes)} sizes, {len(below)} and {len(above)} times"
        )
    _check_positive("below", below)
    _check_positive("above", above)
    ratios = [log(first / second) for first, second in zip(below, above, strict=True)]
    # The loss for each number of sizes below the threshold.
    losses = [
        sum(max(ratio, 0) for ratio in ratios[:count])
        + sum(max(-ratio, 0) for ratio in ratios[count:])
        for count in range(len(sizes) + 1)
    ]
    best = losses.index(min(losses))
    return sizes[best - 1] if best else 0


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (alpha, beta), both positive, with ``seconds`` ≈ alpha + beta · ``sizes``.

    The fit minimises the squares of the relative errors, so that small sizes count as much as
    large ones. Raises ValueError for fewer than two sizes.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(f"expected times of at least two sizes, got {sizes} and {seconds}")
    _check_positive("seconds", seconds)
    times = np.asarray(seconds)
    beta = max(float(np.polyfit(sizes, times, 1, w=1 / times)[0]), 1e-15)
    alpha = np.average(times - beta * np.asarray(sizes), weights=times**-2.0)
    return max(float(alpha), 1e-12), beta


def _check_positive(name: str, seconds: Sequence[float]) -> None:
    """Raise ValueError for a time of 0, which has no relative error or ratio."""
    if not all(time > 0 for time in seconds):
        raise ValueError(f"{name} must be times above 0, got {list(seconds)}")


def best_of(seconds: dict[int, float], usual: int, margin: float = 0.03) -> int:
    """Return the key of the least time, or ``usual`` unless it is slower by ``margin``."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < seconds[usual] * (1 - margin) else usual
