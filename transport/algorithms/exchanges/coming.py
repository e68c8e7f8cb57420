"""What comes on several links at the same time, and where it is kept until it is reduced.

A link from which nobody reads has its window closed, and its sender's kernel takes the way for a
slow one. So from each a few frames may come, whichever is waited for: while one is used, the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from transport.algorithms.team import Team
from transport.link import Link, OnPiece, Outbox
from transport.operands.flat import as_bytes
from transport.operands.operand import ARRIVING, ARRIVING_BEHIND
from transport.operands.reduce_op import Flat


class Coming:
    """The frames that come on one link, in the order of their places ``into``: a few at a time,
    from the beginning on, whichever link is waited for.
    """

    MOST = 2

    def __init__(self, outbox: Outbox, link: Link, into: Sequence[Flat]) -> None:
        self._outbox = outbox
        self._link = link
        self._into = into
        self._taken = 0
        for place in into[: self.MOST - 1]:
            outbox.expect(link, as_bytes(place))

    @property
    def next(self) -> Flat:
        """The place of the frame that is taken next."""
        return self._into[self._taken]

    def take(self, on_piece: OnPiece | None = None) -> Flat:
        """Wait for the next frame, and return its place. The one before it has been used by now,
        so its place is free.
        """
        place = self.next
        for later in self._into[self._taken + self.MOST - 1 : self._taken + self.MOST]:
            self._outbox.expect(self._link, as_bytes(later))
        self._outbox.wait(self._link, on_piece)
        self._taken += 1
        return place


class Places:
    """Scratch memory for what the others send for this rank's ``results``, by laps: for each step
    as many as may come at a time.
    """

    def __init__(self, team: Team, results: Sequence[Flat]) -> None:
        self._sizes = [result.size for result in results]
        self._longest = max(self._sizes)
        count = Coming.MOST * (team.size - 1) * self._longest
        slot = ARRIVING_BEHIND if team.overlap.odd else ARRIVING
        self._room = team.scratch.flat(slot, results[0].dtype, count)

    def of(self, lap: int, step: int) -> Flat:
        """Return where the input of a lap is received; valid for the next laps but one."""
        begin = (Coming.MOST * step + lap % Coming.MOST) * self._longest
        return self._room[begin : begin + self._sizes[lap]]
