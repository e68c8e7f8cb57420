"""Waiting for a place: a rank that is there, and that the members may take when they lose one."""

from __future__ import annotations

import json

from meshlib.diagnosis.event_log import publish
from meshlib.diagnosis.events import Agreed, Ready
from meshlib.job.continuing.epochs import Change
from meshlib.job.world import World
from transport.errors import RankFailedError

OVER = "over"
"""The agreement by which members say that they need nobody any more."""
_LONG_SECONDS = 3600.0


def announce_over(world: World) -> None:
    """Say, once for all members, that those who wait for a place wait in vain."""
    if world.membership.place == 0 and world.membership.agreed(OVER) is None:
        publish(world.store, Agreed(OVER, "{}"))


def await_call(world: World) -> Change | None:
    """Return the epoch in which this rank has got a place; None when the others need none any more.

    Has no deadline: it ends with the others. Raises RankFailedError when all of them are lost.
    """
    membership = world.membership

    def is_over() -> bool:
        return membership.agreed(OVER) is not None or membership.deserted

    while True:
        publish(world.store, Ready(world.rank))
        dropped = membership.latest

        def has_news(dropped: int = dropped) -> bool:
            called = membership.call() is not None
            return called or is_over() or membership.latest > dropped

        while not membership.wait_for_news(has_news, _LONG_SECONDS):
            pass
        called = membership.call()
        if called is not None:
            number, text = called
            return Change.of(number, json.loads(text))
        if is_over():
            if membership.agreed(OVER) is None and membership.bereft:
                raise RankFailedError(
                    f"all ranks that had a place are lost: {sorted(membership.lost)}"
                )
            return None
