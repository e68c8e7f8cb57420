"""``breakpoint``: a debugger on one rank, while the others wait for it."""

from __future__ import annotations

import os
import pdb
import sys
from typing import IO, Any

from meshlib.world import current_world
from transport.deadline import to_seconds

LONGEST_SESSION = 3600.0
"""Seconds that the others wait, unless told otherwise."""


class RankDebugger(pdb.Pdb):
    """pdb on the terminal that the job was started from, where there is one.

    A rank's output may be a pipe to the launcher, which passes on whole lines: a prompt is none.
    """

    def __init__(self) -> None:
        self._opened: list[IO[Any]] = []
        streams: dict[str, Any] = {}
        if sys.stdin is sys.__stdin__ and os.isatty(0) and not os.isatty(1):
            # NOCTTY: a rank leads a session of its own, and would take the terminal over.
            terminal = os.open(os.ttyname(0), os.O_WRONLY | os.O_NOCTTY)
            self._opened = [os.fdopen(0, closefd=False), os.fdopen(terminal, "w")]
            streams = {"stdin": self._opened[0], "stdout": self._opened[1]}
        elif sys.stdin is not sys.__stdin__:
            streams = {"stdin": sys.stdin, "stdout": sys.stdout}
        super().__init__(nosigint=True, **streams)

    def close(self) -> None:
        """Let go of the terminal."""
        for stream in self._opened:
            stream.close()


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = LONGEST_SESSION) -> None:
    """Stop the job here: pdb on ``rank``, the other ranks wait until it goes on.

    Every rank calls it, from the same place. The first ``skip`` calls from one line do nothing.
    The wait is not bound by the deadline of the default group but by ``timeout_s`` (seconds).

    Raises ValueError for a rank that does not exist.
    """
    world = current_world()
    if not 0 <= rank < world.size:
        raise ValueError(f"rank is {rank}; expected 0 to {world.size - 1}")
    seconds = to_seconds(timeout_s)
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    place = (frame.f_code.co_filename, frame.f_lineno)
    world.breakpoints[place] = passed = world.breakpoints.get(place, 0) + 1
    if passed <= skip:
        return
    if world.rank == rank:
        debugger = RankDebugger()
        debugger.message(f"rank {rank} stops here; the others wait until it goes on (c)")
        debugger.cmdqueue.append("up")  # from this function to its caller
        try:
            debugger.set_trace()
        finally:
            debugger.close()
    world.default_group.barrier(timeout=seconds)
