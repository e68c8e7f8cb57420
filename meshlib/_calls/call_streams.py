"""The streams of one group: which calls wait for each other's turn, and which do not."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

from meshlib._calls.call_stream import CallStream, ContinuationStream
from transport._calls.header import Kind
from transport._waiting.deadline import Deadline

# A receive that nobody has sent to by then is given up when its group closes.
UNMATCHED_SECONDS = 0.2
_JOIN_SECONDS = 1.0
_KEPT = 256


class CallStreams:
    """``collectives`` run in the order of issue. So do point-to-point calls with one peer,
    direction and tag. Calls of other streams do not wait for them.
    ``continuations`` follow on both; ``enter()`` makes their thread one of the rank's.
    """

    def __init__(self, name: str, rank: int, enter: Callable[[], None]) -> None:
        self._rank = rank
        self.collectives: CallStream = CallStream(f"meshlib-{name}-{rank}")
        self.continuations: ContinuationStream = ContinuationStream(
            f"meshlib-{name}-then-{rank}", enter
        )
        # A stream lives as long as it has a task or a thread, or is referred to. Those made
        # last are to this, and a few to the compiled core. A tag that never comes again costs none.
        self._peers: WeakValueDictionary[tuple[Kind, int, int], CallStream] = WeakValueDictionary()
        self._kept: deque[CallStream] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()  # of the two: additions, and looks at all

    def of_peer(self, kind: Kind, peer: int, tag: int, /) -> CallStream:
        """Return the stream of a point-to-point call."""
        # A sender's messages share one connection; receives are matched by their tags.
        key = (kind, peer, 0 if kind is Kind.SEND else tag)
        stream = self._peers.get(key)
        if stream is None:
            with self._lock:
                stream = self._peers.get(
                    key
                )  # threads that are the first at the same time share one
                if stream is None:
                    name = f"meshlib-{kind.name.lower()}-{peer}-{self._rank}"
                    stream = self._peers[key] = CallStream(name)
                    self._kept.append(stream)
        return stream

    def drain(self, deadline: Deadline, is_receiving: Callable[[], bool]) -> bool:
        """Wait for calls and their continuations; return whether all ended in time.

        Receives whose messages do not come are not waited for: ``is_receiving`` says whether one is
        on its way.
        """
        while True:
            peers = self._of_peers()
            receives = [stream for kind, stream in peers if kind is Kind.RECV]
            others = [stream for kind, stream in peers if kind is not Kind.RECV]
            streams = [self.collectives, *others]
            idle = min(stream.drain(deadline.remaining()) for stream in streams)
            idle = _drain_receives(receives, deadline, is_receiving) and idle
            # Continuations of a call may make further calls.
            if not self.continuations.is_current():
                idle = self.continuations.drain(deadline.remaining()) and idle
            if deadline.expired or not idle or all(stream.drain(0) for stream in streams):
                return idle

    def is_idle(self) -> bool:
        """True if no call is queued or under way."""
        streams = self.collectives, *(stream for _, stream in self._of_peers())
        return all(stream.is_idle() for stream in streams)

    def join(self) -> None:
        """Let the threads end."""
        of_peers = (stream for _, stream in self._of_peers())
        for stream in (self.collectives, self.continuations, *of_peers):
            stream.join(_JOIN_SECONDS)

    def _of_peers(self) -> list[tuple[Kind, CallStream]]:
        with self._lock:
            return [(kind, stream) for (kind, _, _), stream in self._peers.items()]


def _drain_receives(
    streams: list[CallStream], deadline: Deadline, is_receiving: Callable[[], bool]
) -> bool:
    """Wait for the receives whose messages are arriving; return whether no others are left."""
    while True:
        soon = Deadline.after(min(UNMATCHED_SECONDS, deadline.remaining()))
        if all(stream.drain(soon.remaining()) for stream in streams):
            return True
        if deadline.expired or not is_receiving():
            return False
