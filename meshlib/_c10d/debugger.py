"""``breakpoint``: a debugger on one rank, while the others wait for it."""

from __future__ import annotations

import sys

from meshlib._job.current import current_world
from transport._checks import to_whole_number
from transport._waiting.deadline import to_seconds

LONGEST_SESSION = 3600.0
"""The seconds that the other ranks wait by default."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = LONGEST_SESSION) -> None:
    """Stop the job here: pdb on ``rank``, the other ranks wait until it goes on.

    Every rank calls it, from the same place. The first ``skip`` calls from one line do nothing.
    ``timeout_s`` (seconds) limits the wait, instead of the deadline of the default group.

    Raises ValueError for a rank that does not exist, TypeError for an argument that is not a
    number, and ``CollectiveTimeoutError`` on all ranks when the time is over.
    """
    world = current_world()
    skip = to_whole_number(skip, "skip")
    if not 0 <= to_whole_number(rank, "rank") < world.size:
        raise ValueError(f"rank is {rank}; expected 0 to {world.size - 1}")
    seconds = to_seconds(timeout_s, "timeout_s")
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    place = (frame.f_code.co_filename, frame.f_lineno)
    world.breakpoints[place] = passed = world.breakpoints.get(place, 0) + 1
    if passed <= skip:
        return
    if world.rank == rank:
        from meshlib._c10d.rank_debugger import RankDebugger  # pdb is slow to import

        debugger = RankDebugger()
        debugger.message(f"rank {rank} stops here; the others wait until it goes on (c)")
        debugger.cmdqueue.append("up")  # from this function to its caller
        try:
            debugger.set_trace()
        finally:
            debugger.close()
    world.default_group.barrier(timeout=seconds)
