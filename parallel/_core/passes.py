"""Unused parameters and the times of backward passes, for a reducer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import meshlib as dist
from meshlib import Future, ProcessGroup
from meshlib.extend import at_once
from parallel._arrays import Namespace


class UnusedParameters:
    """The rules of one reducer about unused parameters.

    Parameters are identified by index in ``paths``. With ``find``, they may be unused in any pass.
    With ``static``, every pass must leave the same parameters unused as the first pass.
    """

    def __init__(
        self, paths: Sequence[str], group: ProcessGroup, *, find: bool, static: bool
    ) -> None:
        self._paths = paths
        self._group = group
        self._find = find
        self._static = static
        # After the first pass of a static graph: unused on this rank, and unused on all ranks.
        self._known: set[int] | None = None
        self._absent: set[int] | None = None

    def forget(self) -> None:
        """Treat the next pass as the first, after a change of the parameters."""
        self._known = self._absent = None

    def check(self, unused: set[int], *, whole_pass: bool) -> None:
        """Raise RuntimeError when ``unused`` contains unexpected parameters.

        Before the pass it has only those that the forward did not use. After the pass
        (``whole_pass``) it has all.
        """
        if self._known is not None:
            changed = unused ^ self._known if whole_pass else unused - self._known
            if changed:
                raise RuntimeError(
                    "static_graph=True, but these parameters are used in one pass and not in "
                    f"another on rank {self._group.rank()} of {self._group}: {self._name(changed)}"
                )
        elif unused and not (self._find or self._static):
            raise RuntimeError(
                f"these parameters got no gradient on rank {self._group.rank()} of {self._group}: "
                f"{self._name(unused)}. Use them in the forward pass, freeze them "
                "(requires_grad=False) on all ranks, or pass find_unused_parameters=True"
            )

    def learn(self, unused: set[int]) -> None:
        """Record the parameters that a pass of this rank did not use."""
        if self._static and self._known is None:
            self._known = set(unused)

    def absent_everywhere(self, present: Sequence[bool], xp: Namespace) -> set[int]:
        """Return the parameters for which no rank has a gradient, and which get no average.

        ``present`` is True for each parameter for which this rank has a gradient. A collective,
        unless the result is known from an earlier pass.
        """
        if self._absent is not None:
            return self._absent
        if not (self._find or self._static):
            return set()
        flags = xp.asarray(present, dtype="uint8")
        self._group.all_reduce(flags, op=dist.ReduceOp.MAX)
        absent = {number for number, flag in enumerate(flags.tolist()) if not flag}
        if self._static:
            self._absent = absent
        return absent

    def _name(self, numbers: set[int]) -> str:
        return ", ".join(self._paths[number] for number in sorted(numbers))


@dataclass(frozen=True, slots=True)
class PassStatistics:
    """The times of a synchronised backward pass and its forward passes, in seconds.

    ``forward`` and ``backward`` are the module's times since the last synchronised pass, including
    passes inside ``no_sync``. ``communication`` is the time during which at least one bucket was in
    flight. ``exposed`` is the part of it after the end of the module's backward.
    """

    forward: float
    backward: float
    communication: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The fraction of the communication that overlapped with the backward pass, 0 to 1."""
        return 1.0 - self.exposed / self.communication if self.communication else 0.0


class Stopwatch:
    """Measures the times of one pass."""

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
        """Begin a synchronised pass, with no bucket in flight."""
        self._launched = []
        self._landed = []

    def watch(self, future: Future[Any]) -> None:
        """Record the current time as a bucket's launch, and the time when ``future`` completes."""
        index = len(self._launched)
        now = time.perf_counter()
        self._launched.append(now)
        self._landed.append(now)
        landed = self._landed  # the list of this pass, even if the future completes in a later one

        def record(_: Future[Any]) -> None:
            landed[index] = time.perf_counter()

        at_once(future, record)

    def finish(self) -> PassStatistics:
        """Return the statistics of the pass, and reset the stopwatch."""
        communication = exposed = 0.0
        begin = end = 0.0
        for launched, landed in zip(self._launched, self._landed, strict=True):
            # Launches are in order: each bucket extends the current interval or begins a new one.
            begin, end = max(launched, end), max(landed, end)
            communication += end - begin if end > begin else 0.0
            exposed += max(0.0, end - max(begin, self._computed))
        statistics = PassStatistics(self._forward, self._backward, communication, exposed)
        self._forward = self._backward = 0.0
        return statistics
