"""How a job has ended that goes on when ranks are lost: as its first member has.

The first member is rank 0, until the members agree on an epoch without it (``shrink_group``,
``ElasticMesh``): then it is the first of those who have gone on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshlib.diagnosis.event_log import LogReader, last_log
from meshlib.diagnosis.events import Agreed, parse
from meshlib.job.membership import epoch_number
from meshlib.launcher.ranks.failure import RankExit
from transport.store.base import Store


def last_members(store: Store, attempt: int) -> list[int] | None:
    """Return the members of the last epoch that was agreed on in ``attempt``, by place; None where
    nothing was: they are those that the job began with.
    """
    log = last_log(store, attempt)
    if log is None:
        return None
    found: dict[int, list[int]] = {}
    for event in LogReader(store, log, parse).read(0.0):
        if isinstance(event, Agreed) and event.text != "null":
            number = epoch_number(event.name)
            if number is not None:
                found[number] = json.loads(event.text)["members"]
    return found[max(found)] if found else None


def exits_of_first(members: Sequence[int], exits: Sequence[RankExit]) -> list[RankExit]:
    """Return those of ``exits``, of ranks that failed or were stopped, that say how the job ended.

    Nothing, where the first of ``members`` has ended well: the failures of others were told when
    they came. Where it has failed because of others, theirs as well.
    """
    first = next((item for item in exits if item.rank == members[0]), None)
    if first is None:
        return []
    if first.is_cause and not first.stopped:
        return [first]
    return [item for item in exits if item.rank in members]
