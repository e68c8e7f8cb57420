"""How many connections a link wants: learnt while its frames leave.

Two things leave a wire with delay idle that further connections mend. The kernel's memory for a
connection may be less than the wire takes in a round trip. And a connection that was at rest sends
slowly at first: so many of them begin with so many times as much.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence, Sized
from operator import or_

from transport.tcp.deal import BLOCK_BYTES, MOST_CONNECTIONS, shares_of
from transport.tcp.pace import Advice, Window, begins_anew, window_of

# From this round trip on (seconds) it matters: what further connections cost is less.
_FAR = 0.005
# Found in so many frames, it is taken for a habit.
_TELLING = 3
# Of a full connection: more is under way than this part of what is allowed, so that is what holds
# it back, and not memory.
_ALL_ALLOWED = 0.9
# It moves at least this part of what is under way in a round trip. Where it moves less, who is
# waited for is a slow reader, or all share a slower wire.
_USED = 0.7
# Connections that are allowed less than this part of what another one is are young, unless they
# have shrunk: it is not known yet what they are good for.
_GROWN = 0.5
# Such frames have blocks enough for all connections.
_LARGE = 4 * MOST_CONNECTIONS * BLOCK_BYTES
# A flight is almost twice the one before.
_NOT_QUITE = 1.1
# Fewer flights are not worth a mend: there is always one, and other frames follow in the second.
_MANY = 3
# Bytes a second: where all that leaves at once takes longer at this rate than its flights, these do
# not hold it up.
_SLOW_RATE = 4e8


class Width:
    """How many connections the link called ``name`` wants, from what is seen when frames leave.

    ``advice`` tells the user which setting would save them. ``links`` are those that may have
    frames at the same time, with this one.
    """

    def __init__(self, name: str, advice: Advice, links: Sized) -> None:
        self._name = name
        self._advice = advice
        self._links = links
        self.wanted: int = 1
        self._full = 0
        self._rests = 0
        self._looks = False
        self._near = False
        self._begins_anew: bool | None = None

    def shares(self, connections: Sequence[socket.socket], nbytes: int) -> bytes:
        """Look at the connections before a frame of ``nbytes`` is dealt to them; return its shares:
        none for a single connection.
        """
        if self._near and len(connections) == 1:
            return b""
        if self._begins_anew is None:
            self._begins_anew = begins_anew(connections[0])
        first = window_of(connections[0], self._begins_anew)
        self._looks = first is not None and first.round_trip >= _FAR
        if len(connections) == 1:
            self._near = not self._looks
            if first is not None and first.shrunk:
                self._note_start(first, first.allowed, nbytes, 1)
            return b""
        windows = [first, *(window_of(sock, self._begins_anew) for sock in connections[1:])]
        rooms = [1 if each is None else min(each.allowed, each.room) for each in windows]
        grown = [room >= _GROWN * max(rooms) for room in rooms]
        shrunk = [each is not None and each.shrunk for each in windows]
        if first is not None and first.shrunk and all(map(or_, grown, shrunk)):
            self._note_start(first, sum(rooms), nbytes, len(rooms))
        self._looks = self._looks and all(grown)
        if nbytes >= _LARGE:
            # Without a block now and then, those that are young would never grow.
            block = sum(rooms) * BLOCK_BYTES // nbytes
            rooms = [
                room if old else max(room, block) for room, old in zip(rooms, shrunk, strict=True)
            ]
        return shares_of(rooms, nbytes)

    def _note_start(self, first: Window, allowed: int, nbytes: int, connections: int) -> None:
        # Frames behind others in the same call say nothing of its beginning.
        if not self._looks or first.under_way or self.wanted > connections:
            return
        flights = [
            _flights(nbytes, allowed + more * first.least)
            for more in range(MOST_CONNECTIONS - connections + 1)
        ]
        at_once = nbytes * max(1, len(self._links))
        waiting = flights[0] * first.round_trip
        if flights[0] < _MANY or flights[-1] == flights[0] or at_once > waiting * _SLOW_RATE:
            return
        self._rests += 1
        if self._rests >= _TELLING:
            self._rests = 0
            self._advice.slow_starts(self._name, first.round_trip)
            self.wanted = connections + flights.index(flights[-1])

    def note_full(self, sock: socket.socket, connections: int) -> None:
        """Look at a connection that takes no more: is it for want of memory?"""
        if not self._looks or self.wanted > connections:
            return
        window = window_of(sock, begins_anew=False)
        if window is None:
            return
        # Of less, a peer that reads slowly has closed its window.
        if not window.room <= window.under_way < _ALL_ALLOWED * window.allowed:
            return
        if _USED * window.under_way <= window.rate * window.round_trip:
            self._looks = False  # until the next frame
            self._full += 1
            if self._full >= _TELLING:
                self._full = 0
                self._advice.narrow_windows(self._name, 2 * connections, window.round_trip)
                self.wanted = min(2 * connections, MOST_CONNECTIONS)


def _flights(nbytes: int, window: int) -> int:
    """Return in how many flights a frame leaves whose first one is a ``window``."""
    return math.ceil(math.log2(_NOT_QUITE * nbytes / window + 1))
