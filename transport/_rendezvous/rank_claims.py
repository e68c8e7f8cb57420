"""Claims of ranks: each process claims its rank once in a job, so two jobs never share a store.

A process that initialises again at the same place may find the store of the previous job, which is
about to end. In that store its rank is already claimed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from transport._errors import DistStoreError, StorePlaceError
from transport._store.base import Store
from transport._store.prefix_store import PrefixStore
from transport._waiting.deadline import Deadline
from transport._waiting.interrupts import next_slice

_PAUSE_SECONDS = 0.05
# A rank held by another process is a mistake, or belongs to a previous job that is ending.
_STRANGER_SECONDS = 15.0
_RANK = "rendezvous/rank"
_NEXT = "rendezvous/next"

Connect = Callable[[Deadline], Store]


def in_group(store: Store, group_name: str) -> Store:
    """Return the part of ``store`` that belongs to the job called ``group_name``."""
    return PrefixStore(group_name, store) if group_name else store


def next_job_part(store: Store, rank: int) -> Store:
    """Return the part for this rank's next job in a store that outlives jobs.

    The n-th calls of all ranks return the same part.
    """
    generation = store.add(f"{_RANK}/{rank}", 1)
    return PrefixStore(f"turn{generation}", store)


def current_job_part(store: Store) -> Store:
    """Return the part of the current job in a store that outlives jobs."""
    generation = max(store.add(f"{_RANK}/0", 0), 1)
    return PrefixStore(f"turn{generation}", store)


def claim_rank(
    connect: Connect, rank: int, world_size: int, deadline: Deadline
) -> tuple[Store, int]:
    """Claim ``rank`` in the store that ``connect`` returns; return the store and the rank.

    Rank -1 claims the next free rank. Raises DistStoreError at the deadline, or earlier if another
    process holds the rank. Raises a StorePlaceError of ``connect`` without retrying.
    """
    own = f"{socket.gethostname()} process {os.getpid()}"
    token = f"{own} {os.urandom(8).hex()}".encode()
    begin = time.monotonic()
    while True:
        limit = deadline.seconds
        # An error here may come from the store of a previous job that has just ended.
        store: Store | None = None
        succeeded = False
        try:
            store = connect(deadline)
            claimed = rank if rank >= 0 else store.add(_NEXT, 1) - 1
            holder = token
            if claimed < world_size:
                holder = store.compare_set(f"{_RANK}/{claimed}", b"", token)
                if holder == token:
                    succeeded = True
                    return store, claimed
            where, reason = store.describe(), _explain(claimed, world_size, holder)
            if own.encode() not in holder:
                limit = min(limit, _STRANGER_SECONDS)
        except StorePlaceError:
            raise
        except DistStoreError as error:
            where = store.describe() if store is not None else "store"
            reason = str(error)
        finally:
            if store is not None and not succeeded:
                store.close()
        spent = time.monotonic() - begin
        if spent + _PAUSE_SECONDS >= limit:
            raise DistStoreError(f"{where}: no rank within {spent:.1f} s: {reason}")
        time.sleep(next_slice(_PAUSE_SECONDS))


def _explain(rank: int, world_size: int, holder: bytes) -> str:
    if rank >= world_size:
        return f"world_size={world_size} processes have already joined; this one is too many"
    name = holder.decode(errors="replace").rpartition(" ")[0]
    return f"rank {rank} has already joined, as {name}, or an earlier job has not ended here"
