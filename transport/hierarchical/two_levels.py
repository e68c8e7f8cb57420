"""The collectives of a group over several hosts, with two levels."""

from __future__ import annotations

from typing import Any

from transport.call import Call
from transport.communicators.base import Collectives
from transport.communicators.forwarding import Forwarding
from transport.hierarchical import copies, reductions
from transport.hierarchical.levels import Levels
from transport.operands.quiet import quiet

_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}


class TwoLevels(Forwarding):
    """Every collective on ``levels``."""

    def __init__(self, levels: Levels) -> None:
        self.rank = levels.rank
        self.size = levels.size
        self._levels = levels

    @property
    def inside(self) -> Collectives:
        """The collectives of the members on this host."""
        return self._levels.inside

    def _hand_on(self, call: Call, collective: str, *arguments: Any) -> None:
        if collective not in _REDUCTIONS:
            getattr(copies, collective)(self._levels, call, *arguments)
            return
        with quiet(arguments[0]):
            getattr(reductions, collective)(self._levels, call, *arguments)
