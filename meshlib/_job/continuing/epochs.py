"""From one epoch of a job to the next: the members agree on the next members and groups.

The next members may include ranks that wait for a place.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from meshlib._events.events import Agreed, Ready
from meshlib._events.log import publish
from meshlib._job.continuing.agreement import Agreement, Proposals
from meshlib._job.membership import Epoch, epoch_name, without
from meshlib._job.world import World
from meshlib._plain_text import first_of
from transport._errors import DistBackendError, RankFailedError

OVER = "over"
"""The name of the agreement that the members need no more ranks."""
_LONG_SECONDS = 3600.0

Choose = Callable[[Proposals, Mapping[int, str]], Mapping[str, Any] | None]
"""``choose(proposals, missing)`` returns the decision, with the ``members`` by place, or None to
wait for more ranks. See ``meshlib._job.continuing.agreement``."""


@dataclass(frozen=True, slots=True)
class Change:
    """An agreed change: the next ``epoch`` and the ids of the groups ``kept``.

    ``missing`` has the reason for each missing rank, ``chosen`` the whole decision.
    """

    epoch: Epoch
    kept: frozenset[str]
    missing: Mapping[int, str]
    chosen: Mapping[str, Any]

    @classmethod
    def of(cls, number: int, agreed: Mapping[str, Any]) -> Change:
        """Return the agreed change to the epoch ``number``."""
        missing = {int(rank): why for rank, why in agreed["missing"].items()}
        epoch = Epoch(number, tuple(agreed["members"]))
        return cls(epoch, frozenset(agreed["kept"]), missing, agreed)


def agree_on_epoch(
    world: World,
    *,
    proposal: Any = None,
    choose: Choose | None = None,
    excluded: Collection[int] = (),
    timeout: float,
    wait: float = 0.0,
) -> Change:
    """Agree with all remaining members of this epoch on the next one; return the change.

    Every remaining member calls this, so that no member is in another call when it returns. The
    caller must then ``enter`` the epoch. By default, all members that are not ``excluded`` (global
    ranks) continue. ``proposal`` (JSON values) is an argument of ``choose``, which may wait up to
    ``wait`` seconds for more ranks.

    Raises DistStoreError on a rank that cannot reach the store, and CollectiveTimeoutError if there
    is no agreement within ``timeout`` seconds.
    """
    present = world.membership.epoch

    def decide(proposals: Proposals, missing: Mapping[int, str]) -> dict[str, Any] | None:
        alive = {rank: one for rank, one in proposals.items() if rank not in missing}
        proposed = {rank: one["proposal"] for rank, one in alive.items()}
        if choose is None:
            chosen = {"members": without(present.members, missing)}
        elif (chosen := choose(proposed, missing)) is None:
            return None
        kept = _kept([one["groups"] for one in alive.values()])
        return {**chosen, "kept": kept, "missing": dict(missing)}

    number = present.number + 1
    name = epoch_name(number)
    agreement = Agreement(world.store, world.membership, name, present.members, excluded)
    mine = {"proposal": proposal, "groups": world.registry.quiet()}
    agreed = agreement.reach(mine, decide, timeout, wait)
    if agreed is None:
        raise DistBackendError(
            f"too few are left for epoch {number} of the members [{first_of(present.members)}],"
            f" and no other ranks arrived within {wait:g} s"
        )
    return Change.of(number, agreed)


def enter(world: World, change: Change) -> None:
    """Begin the agreed epoch.

    Raises RankFailedError on a rank without a place in it, which becomes a job of one rank.
    """
    rank, epoch = world.rank, change.epoch
    if rank in epoch.members:
        world.begin_epoch(epoch, change.kept)
        return
    stand_by(world, epoch.number)
    why = change.missing.get(rank, "has no place in it")
    raise RankFailedError(f"rank {rank} is excluded from epoch {epoch.number}: it {why}", rank)


def stand_by(world: World, number: int) -> None:
    """Leave the other ranks in epoch ``number`` and become a job of one rank."""
    world.begin_epoch(Epoch(number, (world.rank,)), joining=True)


def announce_over(world: World) -> None:
    """Notify the ranks that wait for a place that they get none. One member does so for all."""
    if world.membership.place == 0 and world.membership.agreed(OVER) is None:
        publish(world.store, Agreed(OVER, "{}"))


def await_call(world: World) -> Change | None:
    """Wait for a place; return the change, or None if the members need no more ranks.

    Has no deadline: the wait ends with the job. Raises RankFailedError if all members are lost.
    """
    membership = world.membership

    def is_over() -> bool:
        return membership.agreed(OVER) is not None or membership.all_gone

    while True:
        publish(world.store, Ready(world.rank))
        dropped = membership.latest

        def has_changed(dropped: int = dropped) -> bool:
            called = membership.call() is not None
            return called or is_over() or membership.latest > dropped

        while not membership.wait_for_change(has_changed, _LONG_SECONDS):
            pass
        called = membership.call()
        if called is not None:
            number, text = called
            return Change.of(number, json.loads(text))
        if is_over():
            if membership.agreed(OVER) is None and membership.all_lost:
                raise RankFailedError(f"all ranks with a place are lost: {sorted(membership.lost)}")
            return None


def _kept(reports: list[Mapping[str, list[int]]]) -> list[str]:
    """Return the groups on which all members made the same calls and have no open call."""
    counted = Counter(
        (group, *standing) for report in reports for group, standing in report.items()
    )
    return sorted(group for (group, *standing), count in counted.items() if count == standing[-1])
