"""The streams of a group: calls of one stream run in order, different streams are independent."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from weakref import WeakValueDictionary

from meshlib._calls.call_stream import CallStream, ContinuationStream
from transport._calls.header import Kind
from transport._waiting.deadline import Deadline

# A closing group gives up receives whose messages do not arrive in this time.
UNMATCHED_SECONDS = 0.2
_JOIN_SECONDS = 1.0
_KEPT = 256


class CallStreams:
    """The streams of one group: of collectives, of continuations, and of point-to-point calls.

    Point-to-point calls with the same peer, direction and tag share a stream. ``continuations``
    runs the callbacks of all calls; its thread first calls ``enter()``, to belong to the rank.
    """

    def __init__(self, name: str, rank: int, enter: Callable[[], None]) -> None:
        self._rank = rank
        self.collectives: CallStream = CallStream(f"meshlib-{name}-{rank}")
        self.continuations: ContinuationStream = ContinuationStream(
            f"meshlib-{name}-then-{rank}", enter
        )
        # A stream lives while it has a task, a thread or a reference. ``_kept`` refers to the
        # newest streams, the compiled core to a few. So a tag that is never used again costs no
        # memory.
        self._peers: WeakValueDictionary[tuple[Kind, int, int], CallStream] = WeakValueDictionary()
        self._kept: deque[CallStream] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()  # held to add or list streams

    def of_peer(self, kind: Kind, peer: int, tag: int, /) -> CallStream:
        """Return the stream of a point-to-point call."""
        # A sender's messages share one connection; receives are matched by their tags.
        key = (kind, peer, 0 if kind is Kind.SEND else tag)
        stream = self._peers.get(key)
        if stream is None:
            with self._lock:
                # Another thread may have added it meanwhile.
                stream = self._peers.get(key)
                if stream is None:
                    name = f"meshlib-{kind.name.lower()}-{peer}-{self._rank}"
                    stream = self._peers[key] = CallStream(name)
                    self._kept.append(stream)
        return stream

    def drain(self, deadline: Deadline, is_receiving: Callable[[], bool]) -> bool:
        """Wait for calls and their continuations; return whether all ended in time.

        Does not wait for receives without a message; ``is_receiving()`` is true while one arrives.
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
