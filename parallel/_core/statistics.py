"""What a synchronised pass cost, and how much of its communication was hidden."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from meshlib import Future
from meshlib.extend import at_once


@dataclass(frozen=True, slots=True)
class PassStatistics:
    """One synchronised backward pass and the forward passes that it belongs to, in seconds.

    ``forward`` and ``backward`` are the module's own, since the last synchronised pass: passes
    under ``no_sync`` count as well. In ``communication`` at least one bucket was under way.
    ``exposed`` is the part of it that came after the module's backward had ended.
    """

    forward: float
    backward: float
    communication: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The share of the communication that went on during the backward pass, 0 to 1."""
        return 1.0 - self.exposed / self.communication if self.communication else 0.0


class Stopwatch:
    """Collects the moments of one pass."""

    def __init__(self) -> None:
        self._forward = 0.0
        self._backward = 0.0
        self._computed = 0.0
        self._launched: list[float] = []
        self._landed: list[float] = []

    def add_forward(self, begun: float) -> None:
        """Count a forward pass that began at ``begun`` and ends now."""
        self._forward += time.perf_counter() - begun

    def add_backward(self, begun: float) -> None:
        """Count a backward pass that began at ``begun`` and ends now."""
        self._computed = time.perf_counter()
        self._backward += self._computed - begun

    def begin(self) -> None:
        """Begin a synchronised pass: no bucket is under way."""
        self._launched = []
        self._landed = []

    def watch(self, future: Future[Any]) -> None:
        """Note that a bucket was handed over just now, and the moment when ``future`` is done."""
        index = len(self._launched)
        now = time.perf_counter()
        self._launched.append(now)
        self._landed.append(now)
        landed = self._landed  # of this pass, whatever comes after it

        def note(_: Future[Any]) -> None:
            landed[index] = time.perf_counter()

        at_once(future, note)

    def finish(self) -> PassStatistics:
        """Return what was collected, and begin anew."""
        communication = exposed = 0.0
        begin = end = 0.0
        for launched, landed in zip(self._launched, self._landed, strict=True):
            # Buckets leave in order: each extends the time under way, or begins it once more.
            begin, end = max(launched, end), max(landed, end)
            communication += end - begin if end > begin else 0.0
            exposed += max(0.0, end - max(begin, self._computed))
        statistics = PassStatistics(self._forward, self._backward, communication, exposed)
        self._forward = self._backward = 0.0
        return statistics
