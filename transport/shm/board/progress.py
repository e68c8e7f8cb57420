"""How far a member is, in the numbers of its board."""

from __future__ import annotations

from transport.native import core


class _Progress:
    """The ``number`` of the call; the turn at which it begins (``base``); a turn that all members
    have come to (``floor``); one that they must have come to before blocks are used again
    (``busy``); and how many calls have cards that are still to be compared (``unchecked``).
    """

    __slots__ = ("base", "busy", "floor", "number", "unchecked")

    def __init__(self) -> None:
        self.number = self.base = self.floor = self.busy = self.unchecked = 0


Progress: type[_Progress] = _Progress if core is None else core.Progress
