"""How a rank waits for a word in shared memory to change."""

from __future__ import annotations

import os
from collections.abc import Callable

from transport.call import Call
from transport.shm.board.segment import Segment
from transport.waiting import LookOut

# A sleeper looks this often whether the world has ended, should a wake-up have been missed.
SLICE_SECONDS = 0.05


class Patience:
    """One rank's way of waiting, chosen from how many ranks share how many cores.

    It looks (``LookOut``) in calls alone whose end the issuing thread waits for: in others it would
    starve the one that computes. With more ranks than cores the peer may be waiting for this very
    core, so it is yielded at once. Ranks that are threads of one process share the interpreter's
    lock, and always sleep.
    """

    def __init__(self, ranks: int) -> None:
        self.polls = True
        """Whether a rank may look before it sleeps."""
        self.crowded: bool = ranks > len(os.sched_getaffinity(0))
        """Whether there are more ranks than cores."""
        self._look_out = LookOut()

    def share_process(self) -> None:
        """Know that another rank is a thread of this process."""
        self.polls = False

    def poll(self, call: Call, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` came true in the time that is worth it before sleeping."""
        return self.polls and call.sync and self._look_out.until(ready)


def sleep(
    call: Call,
    ready: Callable[[], bool],
    segment: Segment,
    word: int,
    sleeping: Callable[[bool], None],
    check: Callable[[], None],
) -> None:
    """Return when ``ready()``, which becomes true together with a change of word number ``word`` of
    ``segment``.

    ``sleeping`` is told when this rank goes to sleep and when it has woken; whoever changes the
    word must wake it in between. ``check`` raises when there is no more hope or time.
    """
    sleeping(True)
    try:
        while True:
            seen = segment.words[word]
            if ready():
                return
            check()
            segment.futex.wait(word, seen, min(SLICE_SECONDS, call.deadline.remaining()))
    finally:
        sleeping(False)
