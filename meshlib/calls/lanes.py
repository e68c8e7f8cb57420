"""The lanes of one group: which calls wait for each other's turn, and which do not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from meshlib.calls.lane import Continuations, Lane
from transport.call import Kind
from transport.deadline import Deadline

# A receive that nobody has sent to by then is given up when its group closes.
UNMATCHED_SECONDS = 0.2
_JOIN_SECONDS = 1.0
_KEPT = 256


class Lanes:
    """``collectives`` run in the order of issue, and so do point-to-point calls with one peer,
    direction and tag, independently of all others. ``continuations`` follow on both; ``enter()``
    makes their thread one of the rank's.
    """

    def __init__(self, name: str, rank: int, enter: Callable[[], None]) -> None:
        self._rank = rank
        self.collectives: Lane = Lane(f"meshlib-{name}-{rank}")
        self.continuations: Continuations = Continuations(f"meshlib-{name}-then-{rank}", enter)
        # A lane lives as long as it has a task or a thread, or is known to somebody: those made
        # last are to this, and a few to the compiled core. A tag that never comes again costs none.
        self._peers: WeakValueDictionary[tuple[Kind, int, int], Lane] = WeakValueDictionary()
        self._kept: deque[Lane] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()  # of the two: additions, and looks at all

    def of_peer(self, kind: Kind, peer: int, tag: int) -> Lane:
        """Return the lane of a point-to-point call."""
        # A sender's messages share one connection; receives are matched by their tags.
        key = (kind, peer, 0 if kind is Kind.SEND else tag)
        lane = self._peers.get(key)
        if lane is None:
            with self._lock:
                lane = self._peers.get(key)  # threads that are the first at the same time share one
                if lane is None:
                    name = f"meshlib-{kind.name.lower()}-{peer}-{self._rank}"
                    lane = self._peers[key] = Lane(name)
                    self._kept.append(lane)
        return lane

    def parts_of_peer(self, kind: Kind, peer: int, tag: int, /) -> tuple[Any, ...]:
        """Return the ``parts`` of that lane."""
        return self.of_peer(kind, peer, tag).parts()

    def drain(self, deadline: Deadline, is_receiving: Callable[[], bool]) -> bool:
        """Let calls end, and what follows on them; return whether all did in time.

        Receives whose messages do not come are not waited for: ``is_receiving`` says whether one is
        on its way.
        """
        while True:
            peers = self._of_peers()
            receives = [lane for kind, lane in peers if kind is Kind.RECV]
            others = [lane for kind, lane in peers if kind is not Kind.RECV]
            lanes = [self.collectives, *others]
            idle = min(lane.drain(deadline.remaining()) for lane in lanes)
            idle = _drain_receives(receives, deadline, is_receiving) and idle
            # What follows on a call may make others.
            if not self.continuations.is_current():
                idle = self.continuations.drain(deadline.remaining()) and idle
            if deadline.expired or not idle or all(lane.drain(0) for lane in lanes):
                return idle

    def is_idle(self) -> bool:
        """Whether no call is queued or under way."""
        lanes = self.collectives, *(lane for _, lane in self._of_peers())
        return all(lane.is_idle() for lane in lanes)

    def join(self) -> None:
        """Let the threads end."""
        of_peers = (lane for _, lane in self._of_peers())
        for lane in (self.collectives, self.continuations, *of_peers):
            lane.join(_JOIN_SECONDS)

    def _of_peers(self) -> list[tuple[Kind, Lane]]:
        with self._lock:
            return [(kind, lane) for (kind, _, _), lane in self._peers.items()]


def _drain_receives(
    lanes: list[Lane], deadline: Deadline, is_receiving: Callable[[], bool]
) -> bool:
    """Let receives end whose messages come; return whether there are no others."""
    while True:
        soon = Deadline.after(min(UNMATCHED_SECONDS, deadline.remaining()))
        if all(lane.drain(soon.remaining()) for lane in lanes):
            return True
        if deadline.expired or not is_receiving():
            return False
