"""Becoming a member of an NCCL communicator: who is where, the unique id, and a deadline."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from transport.call import Call
from transport.cuda.driver import Driver
from transport.errors import (
    CommunicatorAbortedError,
    CommunicatorTimeoutError,
    DistBackendError,
    StoreTimeoutError,
)
from transport.nccl.library import NcclComm, NcclLibrary, version_text
from transport.runtime import Membership
from transport.tcp.address import this_machine

_SLICE_SECONDS = 0.05


def join(
    membership: Membership,
    library: NcclLibrary,
    driver: Driver,
    device: int,
    call: Call,
    aborted: Callable[[], str | None],
) -> NcclComm:
    """Meet the other members within the deadline of ``call`` and return this one's communicator.

    Raises DistBackendError when two members share a GPU, which NCCL refuses, or have different
    versions of NCCL; CommunicatorTimeoutError that names who has not come.
    """
    me = {"host": this_machine(), "gpu": driver.device_id(device), "nccl": library.version()}
    store, rank = membership.store, membership.rank
    # A group may be closed and made again by all its members: what lies there then is old.
    turn = store.add(f"turns/{rank}", 1)
    if rank == 0:
        store.set(f"id/{turn}", library.unique_id())
    store.set(f"place/{turn}/{rank}", json.dumps(me))
    places = [
        json.loads(_wait_for(membership, f"place/{turn}/{peer}", peer, call))
        for peer in range(membership.size)
    ]
    _check(membership, places)
    unique_id = _wait_for(membership, f"id/{turn}", 0, call)
    return _enter(membership, library, driver, device, unique_id, call, aborted)


def _wait_for(membership: Membership, key: str, peer: int, call: Call) -> bytes:
    call.waiting_for = peer
    try:
        value = membership.store.get(key, timeout=call.deadline.remaining())
    except StoreTimeoutError as error:
        raise CommunicatorTimeoutError(
            f"{call.header}: waited {call.deadline.seconds:g} s for {membership.describe(peer)} to"
            " come to NCCL's first call",
            peer,
        ) from error
    call.waiting_for = None
    return value


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


def _enter(
    membership: Membership,
    library: NcclLibrary,
    driver: Driver,
    device: int,
    unique_id: bytes,
    call: Call,
    aborted: Callable[[], str | None],
) -> NcclComm:
    """Enter in a thread of its own: NCCL waits for the others without an end."""
    done = threading.Event()
    outcome: list[NcclComm | Exception] = []
    given_up = threading.Event()

    def enter() -> None:
        try:
            with driver.on(device):
                comm = library.join(membership.size, membership.rank, unique_id)
            outcome.append(comm)
            if given_up.is_set():
                comm.abort()
        except Exception as error:  # noqa: BLE001 (it belongs to the caller)
            outcome.append(error)
        finally:
            done.set()

    threading.Thread(target=enter, name="meshlib-nccl-join", daemon=True).start()
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
