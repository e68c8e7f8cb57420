"""``DeviceMesh.to_jax``: an equal mesh for JAX's own multi-process programs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlib._job.current import current_world, is_thread_world
from meshlib._job.world import World
from transport._communicators.runtime import Membership
from transport._net.sockets import format_address
from transport._tcp.meeting.address import listening_host

if TYPE_CHECKING:
    import jax.sharding

    from meshlib._mesh.layout import IndexArray

_ADDRESS_KEY = "jax/coordinator"
_START_SECONDS = 120
# Far below JAX's default of 300 seconds: a rank that has left never answers.
_SHUTDOWN_SECONDS = 10


def to_jax(ranks: IndexArray, names: Sequence[str]) -> jax.sharding.Mesh:
    """Return the mesh of ``ranks`` with the dims ``names``; see ``DeviceMesh.to_jax``."""
    import jax
    import jax.sharding

    world = current_world()
    if is_thread_world(world):
        raise ValueError("to_jax needs ranks that are processes; this rank is a thread")
    if not jax.distributed.is_initialized():
        _initialize(world)
    if jax.process_count() != world.size or jax.process_index() != world.rank:
        raise ValueError(
            f"jax.distributed was initialised elsewhere: this is its process "
            f"{jax.process_index()} of {jax.process_count()}, but rank {world.rank} of "
            f"{world.size}"
        )
    devices = np.empty(world.size, object)
    for rank in range(world.size):
        own = [device for device in jax.devices() if device.process_index == rank]
        if len(own) != 1:
            raise ValueError(
                f"rank {rank} has {len(own)} devices in JAX; expected one, as in a mesh of ranks. "
                "Check XLA_FLAGS and what is visible to each process"
            )
        devices[rank] = own[0]
    return jax.sharding.Mesh(devices[ranks], names)


def _initialize(world: World) -> None:
    """Connect the job's processes in JAX; the job's store passes on the coordinator's address."""
    import jax

    config: Any = jax.config
    if config.jax_cpu_collectives_implementation in (None, "none"):
        config.update("jax_cpu_collectives_implementation", "gloo")
    # Waits on a group's store end when a rank is lost.
    store = world.default_group.get_group_store()
    if world.rank == 0:
        store.set(_ADDRESS_KEY, _free_address(world).encode())
    address = store.get(_ADDRESS_KEY).decode()
    jax.distributed.initialize(
        address,
        world.size,
        world.rank,
        initialization_timeout=_START_SECONDS,
        coordinator_bind_address=address,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    world.on_close(jax.distributed.shutdown)


def _free_address(world: World) -> str:
    """Return an address on which rank 0's coordinator can listen.

    JAX cannot choose a port itself. This port is free now, but another process may take it.
    """
    membership = Membership(
        group="jax",
        rank=world.rank,
        ranks=tuple(range(world.size)),
        store=world.store,
        runtime=world.runtime,
    )
    host = listening_host(membership)
    family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(where)
        return format_address(host, probe.getsockname()[1])
