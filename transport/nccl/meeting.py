"""Becoming a member of an NCCL communicator: who is where, the unique id, and a deadline."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from transport.call import Call
from transport.communicators.runtime import Membership
from transport.communicators.store_waits import PeerKeys
from transport.cuda.driver import Driver
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
)
from transport.nccl.library import NcclComm, NcclLibrary, version_text
from transport.place import this_machine

_SLICE_SECONDS = 0.05


def join(
    membership: Membership,
    keys: PeerKeys,
    library: NcclLibrary,
    driver: Driver,
    device: int,
    call: Call,
    aborted: Callable[[], str | None],
) -> tuple[NcclComm, bool]:
    """Meet the other members within the deadline of ``call``; return this one's communicator, and
    whether all members' NCCL can split it.

    Whoever aborts has ``aborted()`` give a reason and cancels ``keys``.

    Raises DistBackendError when two members share a GPU, which NCCL refuses, or have different
    versions of NCCL; CommunicatorTimeoutError that names who has not come.
    """
    me = {
        "host": this_machine(),
        "gpu": driver.device_id(device),
        "nccl": library.version(),
        "splits": library.can_split,
    }
    store, rank = membership.store, membership.rank
    # A group may be closed and made again by all its members: what lies there then is old.
    turn = store.add(f"turns/{rank}", 1)
    if rank == 0:
        store.set(f"id/{turn}", library.unique_id())
    store.set(f"place/{turn}/{rank}", json.dumps(me))
    members = range(membership.size)
    said = keys.read_all(lambda peer: f"place/{turn}/{peer}", members, call)
    places = [json.loads(said[peer]) for peer in members]
    _check(membership, places)
    unique_id = keys.read(f"id/{turn}", 0, call)
    size = membership.size
    comm = in_time(lambda: library.join(size, rank, unique_id), driver, device, call, aborted)
    assert comm is not None
    return comm, all(place["splits"] for place in places)


def _check(membership: Membership, places: list[dict[str, Any]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        other = seen.setdefault((place["host"], place["gpu"]), rank)
        if other != rank:
            raise DistBackendError(
                f"{membership.describe(other)} and {membership.describe(rank)} both use the GPU"
                f" {place['gpu']} of one host, and NCCL needs one for each rank. Give each rank its"
                " own (init_device_mesh('cuda', ...) takes number LOCAL_RANK), start fewer ranks,"
                " or use backend 'cuda:cuda_ipc' (one host) or 'cuda:staged', which share a GPU"
            )
    for rank, place in enumerate(places):
        # Members of one release work together, whatever the patch level.
        if place["nccl"] // 100 != places[0]["nccl"] // 100:
            raise DistBackendError(
                f"{membership.describe(0)} has NCCL {version_text(places[0]['nccl'])},"
                f" {membership.describe(rank)} {version_text(place['nccl'])}; expected one version:"
                " install the same nvidia-nccl package everywhere"
            )


def in_time(
    enter: Callable[[], NcclComm | None],
    driver: Driver,
    device: int,
    call: Call,
    aborted: Callable[[], str | None],
) -> NcclComm | None:
    """Return ``enter()``, made in a thread of its own: NCCL waits for the others without an end.

    Raises CommunicatorTimeoutError past the deadline of ``call``, CommunicatorAbortedError once
    ``aborted()`` gives a reason, DistBackendError for NCCL's own errors.
    """
    done = threading.Event()
    outcome: list[NcclComm | Exception | None] = []
    given_up = threading.Event()

    def body() -> None:
        try:
            with driver.on(device):
                comm = enter()
            outcome.append(comm)
            if given_up.is_set() and comm is not None:
                comm.abort()
        except Exception as error:  # noqa: BLE001 (it belongs to the caller)
            outcome.append(error)
        finally:
            done.set()

    threading.Thread(target=body, name="meshlib-nccl-join", daemon=True).start()
    while not done.wait(min(_SLICE_SECONDS, call.deadline.remaining())):
        if (reason := aborted()) is not None:
            given_up.set()
            raise CommunicatorAbortedError(reason)
        if call.deadline.expired:
            given_up.set()
            raise CommunicatorTimeoutError(
                f"{call.header}: NCCL did not connect all members within"
                f" {call.deadline.seconds:g} s; NCCL_DEBUG=INFO tells what it tries",
                None,
            )
    result = outcome[0]
    if isinstance(result, Exception):
        raise DistBackendError(
            f"NCCL could not connect the members: {result}; NCCL_DEBUG=INFO tells more"
        ) from result
    return result
