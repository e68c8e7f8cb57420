"""``breakpoint``: a debugger on one rank while the other ranks wait."""

from __future__ import annotations

import sys

from meshlib._job.current import current_world
from transport._checks import to_whole_number
from transport._waiting.deadline import to_seconds

LONGEST_SESSION = 3600.0
"""The default time that the other ranks wait, in seconds."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float = LONGEST_SESSION) -> None:
    """Stop the job: run pdb on ``rank`` while the other ranks wait until it continues.

    Every rank calls it, from the same line. The first ``skip`` calls from that line do nothing.
    ``timeout_s`` (seconds) limits the wait, instead of the deadline of the default group.

    Raises ValueError for a rank that does not exist, TypeError for an argument that is not a
    number, and ``CollectiveTimeoutError`` on all ranks past ``timeout_s``.
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
        debugger.message(f"rank {rank} stops here; the others wait until it continues (c)")
        debugger.cmdqueue.append("up")  # from this function to its caller
        try:
            debugger.set_trace()
        finally:
            debugger.close()
    world.default_group.barrier(timeout=seconds)
