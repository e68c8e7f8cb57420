"""The beginning of a job: every rank publishes its place, and waits until all have arrived."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshlib._diagnosis.stalls import status_key
from meshlib._events.events import RankEnded
from meshlib._events.log import ended_ranks, publish, register_log
from meshlib._plain_text import first_of
from transport import _environment as environment
from transport._errors import DistStoreError
from transport._place import Place, this_place
from transport._store.base import Store
from transport._waiting.deadline import Deadline

_ALL_HERE = "all-here"
"""The key that ends the wait: ``1``, ``lost``, or the reason why the ranks cannot meet."""
LOST = "lost"
_SERVER = "served-by"
_NOBODY = b"none"
_SIZE = "size"


def meet(store: Store, rank: int, size: int, deadline: Deadline, as_launched: bool) -> bool:
    """Wait for all ``size`` ranks; return True when all have arrived, False if one was lost.

    ``as_launched``: the ranks have the numbers that the launcher assigned. Raises
    ``DistStoreError`` with the missing ranks at the deadline, and immediately if two ranks have
    different sizes.
    """
    if store.serves:
        store.post(_SERVER, str(rank))
    _agree_on_size(store, rank, size)
    store.post(_place_key(rank), this_place().encode())
    store.post(status_key(rank), b"")
    arrived = store.add("arrived", 1)
    if arrived == 1:
        register_log(store)
        if as_launched:
            _publish_ended(store, size)
    try:
        if arrived == size:
            answer = store.compare_set(_ALL_HERE, "", b"1")
        else:
            answer = store.get(_ALL_HERE, timeout=deadline.remaining())
    except DistStoreError as error:
        missing = [r for r in range(size) if not store.check([_place_key(r)])]
        text = (
            f"rank {rank} waited {deadline.seconds:g} s for {size} ranks at "
            f"{store.describe()}: [{first_of(missing)}] have not arrived"
        )
        # Otherwise the other ranks would wait for this rank, which may serve their store.
        call_off(store, text)
        raise DistStoreError(text) from error
    if answer not in (b"1", LOST.encode()):
        raise DistStoreError(f"rank {rank} stopped waiting: {answer.decode()}")
    return answer == b"1"


def call_off(store: Store, why: str = LOST) -> None:
    """End the wait for the arrival of all ranks, also for ranks that wait later."""
    store.compare_set(_ALL_HERE, "", why)


def join(store: Store, rank: int) -> None:
    """Register ``rank`` in a job that has begun without it and does not wait for it."""
    store.multi_set([_place_key(rank), status_key(rank)], [this_place().encode(), b""])


def places_of(store: Store, ranks: Sequence[int]) -> list[Place]:
    """Return the places of ``ranks``, all of which have arrived."""
    return [Place.decode(data) for data in store.multi_get([_place_key(rank) for rank in ranks])]


def _place_key(rank: int) -> str:
    return f"here/{rank}"


def server_of(store: Store) -> int | None:
    """Return the rank that serves ``store``, if a rank does."""
    # A rank that serves the store registers before it arrives.
    answer = store.compare_set(_SERVER, "", _NOBODY)
    return None if answer == _NOBODY else int(answer)


def _agree_on_size(store: Store, rank: int, size: int) -> None:
    first = store.compare_set(_SIZE, "", f"{size} {rank}").decode().split()
    other, first_rank = int(first[0]), int(first[1])
    if other != size:
        text = (
            f"the ranks at {store.describe()} do not agree on the world size: rank"
            f" {first_rank} expects {other} ranks, rank {rank} expects {size}"
        )
        call_off(store, text)
        raise DistStoreError(text)


def _publish_ended(store: Store, size: int) -> None:
    """Publish the ranks that had ended before any rank arrived."""
    for rank in ended_ranks(store, os.environ.get(environment.RESTART_COUNT, "0")):
        if rank < size and not store.check([_place_key(rank)]):
            publish(store, RankEnded(rank))
