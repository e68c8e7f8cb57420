"""How a ``DistributedDataParallel`` takes part in a ``Join``."""

from __future__ import annotations

import enum
from collections.abc import Callable

from parallel.join.joinable import JoinHook


class Phase(enum.IntEnum):
    """The parts of a step in which a wrapper communicates."""

    FORWARD = 1
    BACKWARD = 2


class WrapperHook(JoinHook):
    """Calls ``shadow(phase)`` in the others' phases, ``synchronise(source)`` at the end."""

    def __init__(self, shadow: Callable[[Phase], None], synchronise: Callable[[int], None]) -> None:
        self._shadow = shadow
        self._synchronise = synchronise

    def main_hook(self, phase: int) -> None:
        """Contribute nothing to the others' step."""
        self._shadow(Phase(phase))

    def post_hook(self, is_last_joiner: bool, source: int) -> None:
        """Take over the model of a rank that went on to the end."""
        self._synchronise(source)
