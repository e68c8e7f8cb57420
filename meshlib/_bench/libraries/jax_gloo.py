"""JAX over several processes of one CPU device each, with Gloo's collectives.

JAX's arrays are immutable, so a call makes a new one; that is part of JAX's cost. Calls are
compiled beforehand, and the time includes waiting for the result.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from meshlib._bench.cases import Bound, Case, Floats
from meshlib._bench.libraries.library import LOOPBACK, TIMEOUT, Library

_AXIS = "ranks"


class JaxGloo(Library):
    """``jax.lax``'s collectives under ``jax.jit`` and ``jax.shard_map``."""

    name = "jax"
    cases: ClassVar[frozenset[str] | None] = frozenset(
        {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ping_pong", "barrier"}
    )

    def __init__(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self._jax: Any = importlib.import_module("jax")
        self._jax.config.update("jax_cpu_collectives_implementation", "gloo")
        self._calls: dict[str, Callable[[Any], Any]] = {}
        self._sharding: Any = None
        self._one: Any = None
        self._result: Any = None

    def host(self, size: int) -> int:
        with socket.socket() as free:  # the service does not accept port 0
            free.bind((LOOPBACK, 0))
            return free.getsockname()[1]

    def join(self, port: int, rank: int, size: int) -> None:
        jax = self._jax
        jax.distributed.initialize(
            f"{LOOPBACK}:{port}",
            num_processes=size,
            process_id=rank,
            initialization_timeout=int(TIMEOUT.total_seconds()),
        )
        mesh = jax.sharding.Mesh(np.array(jax.devices()), (_AXIS,))
        spec = jax.sharding.PartitionSpec(_AXIS)
        self._sharding = jax.sharding.NamedSharding(mesh, spec)
        self._calls = {
            name: jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
            for name, body in self._bodies().items()
        }
        self._one = self._put(np.ones(1, np.float32))

    def _bodies(self) -> dict[str, Callable[[Any], Any]]:
        """Return each rank's computation on its part, by case."""
        lax, jnp = self._jax.lax, self._jax.numpy

        def all_to_all(x: Any) -> Any:
            size = lax.axis_size(_AXIS)
            parts = lax.all_to_all(x.reshape(size, -1), _AXIS, split_axis=0, concat_axis=0)
            return parts.reshape(-1)

        def ping_pong(x: Any) -> Any:
            there = lax.ppermute(x, _AXIS, [(0, 1)])
            there, x = lax.optimization_barrier((there, x))  # the answer waits for the message
            back = lax.ppermute(x, _AXIS, [(1, 0)])
            return jnp.where(lax.axis_index(_AXIS) == 0, back, there)

        def all_reduce(x: Any) -> Any:
            return lax.psum(x, _AXIS)

        return {
            "all_reduce": all_reduce,
            "all_gather": lambda x: lax.all_gather(x, _AXIS, tiled=True),
            "reduce_scatter": lambda x: lax.psum_scatter(x, _AXIS, tiled=True),
            "all_to_all": all_to_all,
            "ping_pong": ping_pong,
            "barrier": all_reduce,
        }

    def _put(self, array: Floats) -> Any:
        return self._jax.make_array_from_process_local_data(self._sharding, array)

    def barrier(self) -> object:
        return self._calls["barrier"](self._one).block_until_ready()

    def bind(self, case: Case) -> Bound:
        if case.name == "barrier":
            return self.barrier
        # JAX may read the array later, when the case has filled its input with other values.
        call, x = self._calls[case.name], self._put(case.input.copy())

        def run() -> None:
            self._result = call(x).block_until_ready()

        return run

    def result(self, case: Case) -> Floats:
        if case.name == "barrier":
            return case.output
        result, self._result = np.asarray(self._result.addressable_shards[0].data), None
        return result

    def version(self) -> str:
        return f"jax {self._jax.__version__}, gloo"

    def leave(self) -> None:
        self._jax.distributed.shutdown()
