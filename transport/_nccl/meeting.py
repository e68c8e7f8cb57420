"""The exchange of hosts, GPUs and the unique id before NCCL connects.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from __future__ import annotations

import json
from typing import Any

from transport._calls.call import Call
from transport._communicators.runtime import Membership
from transport._communicators.store_waits import PeerKeys
from transport._cuda.driver import Driver
from transport._errors import DistBackendError
from transport._nccl.library import NcclLibrary, version_text
from transport._place import this_machine


def meet(
    membership: Membership,
    keys: PeerKeys,
    library: NcclLibrary,
    driver: Driver,
    device: int,
    call: Call,
) -> tuple[bytes, bool]:
    """Exchange places and the unique id with the other members within the deadline of ``call``.

    Returns the communicator's unique id, and whether every member's NCCL can split it.

    Raises DistBackendError if two members share a GPU, which NCCL refuses, or have different
    versions of NCCL. Raises CommunicatorTimeoutError, which names a missing member.
    """
    own = {
        "host": this_machine(),
        "gpu": driver.device_id(device),
        "nccl": library.version(),
        "splits": library.can_split,
    }
    store, rank = membership.store, membership.rank
    # A group may be closed and created again; each time it uses new keys.
    generation = store.add(f"turns/{rank}", 1)
    if rank == 0:
        store.set(f"id/{generation}", library.unique_id())
    store.set(f"place/{generation}/{rank}", json.dumps(own))
    members = range(membership.size)
    written = keys.read_all(lambda peer: f"place/{generation}/{peer}", members, call)
    places = [json.loads(written[peer]) for peer in members]
    _check(membership, places)
    unique_id = keys.read(f"id/{generation}", 0, call)
    return unique_id, all(place["splits"] for place in places)


def _check(membership: Membership, places: list[dict[str, Any]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        other = seen.setdefault((place["host"], place["gpu"]), rank)
        if other != rank:
            raise DistBackendError(
                f"{membership.describe(other)} and {membership.describe(rank)} both use the GPU"
                f" {place['gpu']} of one host, but NCCL needs a GPU for each rank. Assign each rank"
                " its own (init_device_mesh('cuda', ...) uses LOCAL_RANK), start fewer ranks, or"
                " use backend 'cuda:cuda_ipc' (one host) or 'cuda:staged', which share a GPU"
            )
    for rank, place in enumerate(places):
        # Different patch levels of one release are compatible.
        if place["nccl"] // 100 != places[0]["nccl"] // 100:
            raise DistBackendError(
                f"{membership.describe(0)} has NCCL {version_text(places[0]['nccl'])},"
                f" {membership.describe(rank)} {version_text(place['nccl'])}; expected one version:"
                " install the same nvidia-nccl package everywhere"
            )
