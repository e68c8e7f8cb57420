"""Orders: which sample stands at which place of an epoch. Computed place by place, never stored."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from parallel.samplers.permutation import Permutation, Positions, uniform


class Order(Protocol):
    """A function from places to samples."""

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample at each of ``positions`` (places of the epoch), as int64."""
        ...


class Sequence:
    """Each sample at the place of its own number."""

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the places themselves."""
        return positions.astype(np.int64, copy=False)


class WeightedDraws:
    """At each place an independent draw, with replacement, of sample i with share weights[i].

    ``cumulative`` are the weights' running sums. The draw at a place inverts them at a number that
    ``key`` and the place determine.
    """

    def __init__(self, cumulative: npt.NDArray[np.float64], key: int) -> None:
        self._cumulative = cumulative
        self._key = key

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample drawn at each place."""
        points = uniform(self._key, positions) * self._cumulative[-1]
        # "right" skips samples of weight 0, whose running sum equals their predecessor's.
        found = np.searchsorted(self._cumulative, points, side="right")
        return np.minimum(found, self._last).astype(np.int64)

    @property
    def _last(self) -> int:
        # The product above may round up to the total: the last sample with weight takes it.
        return int(np.searchsorted(self._cumulative, self._cumulative[-1], side="left"))


class LengthGrouped:
    """A permutation in which neighbours have similar lengths.

    ``order`` is cut into windows of ``window`` places; within each, samples are sorted by length,
    longest first, so that batches cut from it need little padding, and a batch that does not fit
    in memory shows at once. Which samples share a window is still random.
    """

    def __init__(self, order: Permutation, lengths: npt.NDArray[Any], window: int) -> None:
        self._order = order
        self._lengths = lengths
        self._window = window

    def apply(self, positions: npt.NDArray[Any]) -> Positions:
        """Return the sample at each place."""
        result = np.empty(len(positions), np.int64)
        windows = positions // self._window
        for window in np.unique(windows).tolist():
            begin = window * self._window
            places = np.arange(begin, min(begin + self._window, len(self._order)))
            samples = self._order.apply(places)
            lengths = self._lengths[samples]
            # ~ turns the order of integers around, of all: -0 is no larger than -1 if unsigned.
            falling = ~lengths if lengths.dtype.kind in "biu" else -lengths
            samples = samples[np.argsort(falling, kind="stable")]
            inside = windows == window
            result[inside] = samples[positions[inside] - begin]
        return result
