"""A reducer's knowledge of its passes: parameters without a gradient, and the cost of a pass."""

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
    """The rules about unused parameters that one reducer holds to.

    Parameters are numbers; ``paths`` names them. ``find``: they may go unused in any pass.
    ``static``: what goes unused in the first pass, and nothing else, may in all others.
    """

    def __init__(
        self, paths: Sequence[str], group: ProcessGroup, *, find: bool, static: bool
    ) -> None:
        self._paths = paths
        self._group = group
        self._find = find
        self._static = static
        self._known: set[int] | None = None  # unused here, once a first pass has shown it
        self._absent: set[int] | None = None  # used nowhere, likewise

    def forget(self) -> None:
        """Let the next pass be the first one again: the parameters have changed."""
        self._known = self._absent = None

    def check(self, unused: set[int], *, whole_pass: bool) -> None:
        """Raise RuntimeError when ``unused`` parameters were not to be expected.

        Before the pass only those are known that the forward did not use; after it, all.
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
        """Note what a pass of this rank's own left unused."""
        if self._static and self._known is None:
            self._known = set(unused)

    def absent_everywhere(self, present: Sequence[bool], xp: Namespace) -> set[int]:
        """Return the parameters that no rank has a gradient for: theirs is left as it is.

        ``present`` says which this rank has. A collective, unless the answer is known.
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
        """Return the collected values, and begin anew."""
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
