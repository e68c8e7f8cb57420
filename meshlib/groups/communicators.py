"""Which communicator carries the calls on a GPU's arrays."""

from __future__ import annotations

from typing import Any

from transport.communicators import backends
from transport.communicators.base import Communicator
from transport.communicators.runtime import Membership

STAGED = "staged"
"""What carries them where a group has no backend for GPUs: always correct."""

# These take the CPU's transport along, for what they do by way of the host.
_WITH_CPU = frozenset({STAGED, "nccl", "cuda_ipc"})


def make_device_communicator(membership: Membership, name: str, cpu: str | None) -> Communicator:
    """Make the communicator of the backend ``name``, for arrays on a GPU.

    ``cpu`` is the group's backend for the CPU, or None. The communicator takes ``DeviceFlat``,
    which is what the adapter makes of arrays on a GPU.
    """
    factory: Any = backends.lookup(name).load()
    if name in _WITH_CPU and cpu is not None:
        return factory(membership, backends.lookup(cpu).make)
    return factory(membership)
