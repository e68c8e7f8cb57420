"""How a rank waits for a word in shared memory to change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from transport.call import Call
from transport.shm.board.segment import Segment

# Polls before the first yield: some 20 microseconds, longer than a small call takes.
_MOST_SPINS = 300
_FEWEST_SPINS = 4
# Then the processor is offered to others, for so long, before this rank sleeps.
_YIELD_SECONDS = 500e-6
# What came after so few yields was done by somebody who had been waiting for this very core.
_FEW_YIELDS = 2
# A sleeper looks this often whether the world has ended, should a wake-up have been missed.
SLICE_SECONDS = 0.05


class Patience:
    """One rank's way of waiting, chosen from how many ranks share how many cores.

    Polling holds the interpreter's lock and a core, so it is brief, and for calls alone whose end
    the issuing thread waits for: in others it would starve the one that computes. With more ranks
    than cores the peer may be waiting for this very core, so it is yielded at once; and so it is
    when yielding turns out to be what helps, as it does where other programs leave the ranks one
    core together. Ranks that are threads of one process share the lock, and always sleep.
    """

    def __init__(self, ranks: int) -> None:
        self._polls = True
        self._most_spins = _MOST_SPINS if ranks <= len(os.sched_getaffinity(0)) else 0
        self._spins = self._most_spins

    @property
    def polls(self) -> bool:
        """Whether a rank may look before it sleeps."""
        return self._polls

    @property
    def crowded(self) -> bool:
        """Whether there are more ranks than cores."""
        return self._most_spins == 0

    def share_process(self) -> None:
        """Know that another rank is a thread of this process."""
        self._polls = False

    def wait(
        self,
        call: Call,
        ready: Callable[[], bool],
        segment: Segment,
        word: int,
        sleeping: Callable[[bool], None],
        check: Callable[[], None],
    ) -> None:
        """Return when ``ready()``, which becomes true together with a change of word number
        ``word`` of ``segment``.

        ``sleeping`` is told when this rank goes to sleep and when it has woken; whoever changes the
        word must wake it in between. ``check`` raises when there is no more hope or time.
        """
        if not self.poll(call, ready):
            self.sleep(call, ready, segment, word, sleeping, check)

    def poll(self, call: Call, ready: Callable[[], bool]) -> bool:
        """Return whether ``ready()`` came true in the time that is worth it before sleeping."""
        if not self._polls or not call.sync:
            return False
        for _ in range(self._spins):
            if ready():
                return True
        give_up = time.perf_counter() + _YIELD_SECONDS
        yields = 0
        while True:
            os.sched_yield()
            yields += 1
            if ready():
                helped = yields <= _FEW_YIELDS
                self._spins = min(self._most_spins, _FEWEST_SPINS if helped else _MOST_SPINS)
                return True
            if time.perf_counter() >= give_up:
                return False

    @staticmethod
    def sleep(
        call: Call,
        ready: Callable[[], bool],
        segment: Segment,
        word: int,
        sleeping: Callable[[bool], None],
        check: Callable[[], None],
    ) -> None:
        """Return when ``ready()``, as ``wait`` does, asleep meanwhile."""
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
