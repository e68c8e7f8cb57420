"""Exchanging hosts, GPUs and the unique id before NCCL connects.

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
    """Meet the other members within the deadline of ``call``.

    Returns the communicator's unique id, and whether every member's NCCL can split it.

    Raises DistBackendError when two members share a GPU, which NCCL refuses, or have different
    versions of NCCL. Raises CommunicatorTimeoutError that names the missing members.
    """
    me = {
        "host": this_machine(),
        "gpu": driver.device_id(device),
        "nccl": library.version(),
        "splits": library.can_split,
    }
    store, rank = membership.store, membership.rank
    # All members may close a group and make it again: keys of an earlier turn are old.
    turn = store.add(f"turns/{rank}", 1)
    if rank == 0:
        store.set(f"id/{turn}", library.unique_id())
    store.set(f"place/{turn}/{rank}", json.dumps(me))
    members = range(membership.size)
    written = keys.read_all(lambda peer: f"place/{turn}/{peer}", members, call)
    places = [json.loads(written[peer]) for peer in members]
    _check(membership, places)
    unique_id = keys.read(f"id/{turn}", 0, call)
    return unique_id, all(place["splits"] for place in places)


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
