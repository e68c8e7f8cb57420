"""JAX's ring attention in jit, with messages that pass while it computes and without; as root.

    python -m tests.benchmarks.delay.ring_in_jit [ROUND_TRIP_MS] [ROUNDS] [PLACES ...]

Forward and backward of causal attention on two ranks, 8 heads of 64, float32, for each number of
places a rank. Each rank is in a network namespace; a round trip of 0 is shared memory on one host.
With PIN=1 each has one processor. By turns: ``halves`` is ``ring_attention`` as it is, ``whole``
makes a ``permute`` where that begins one, ``none`` sends nothing (and computes something else).
Medians of the slower rank, in milliseconds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.benchmarks.delay.__main__ import Network

_HEADS, _FEATURES, _WARM = 8, 64, 2


def rank_main(rank: int, rounds: int, addresses: list[str], places: list[int]) -> None:
    """Make attentions by turns; rank 0 prints a row for each number of places."""
    if os.environ.get("PIN"):
        os.sched_setaffinity(0, {rank % len(os.sched_getaffinity(0))})
    import jax

    import meshlib as dist
    from meshlib import jit
    from parallel.jax import ring_attention

    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=addresses[0], MASTER_PORT="29423",
        MESHLIB_HOST=addresses[rank], MESHLIB_SECRET="0123456789abcdef" * 4,
    )  # fmt: skip
    dist.init_process_group()

    def whole(x: Any, perm: Any, group: Any, *, tag: int) -> Any:
        del tag
        return SimpleNamespace(x=x, received=jit.permute(x, perm, group))

    def none(x: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(x=x, received=x * 1.01)

    def done(passing: Any, after: Any = None) -> Any:
        del after
        return passing.received

    def patched(start: Any) -> AbstractContextManager[Any]:
        return patch.multiple(jit, permute_start=start, permute_done=done)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (ring_attention(q, k, v, None) ** 2).sum()

    gradients: Any = jax.grad(loss, (0, 1, 2))

    def gradients_of(x: Any) -> Any:
        return gradients(x, x, x)

    ways = {"halves": nullcontext(), "whole": patched(whole), "none": patched(none)}
    for length in places:
        rng = np.random.default_rng(rank)
        shape = (1, length, _HEADS, _FEATURES)
        x = jax.numpy.asarray(rng.normal(size=shape).astype(np.float32))
        programs: dict[str, Any] = {}
        for name, way in ways.items():
            with way:
                programs[name] = jax.jit(gradients_of).lower(x).compile()
        same = zip(
            *(jax.tree.leaves(programs[name](x)) for name in ("halves", "whole")), strict=True
        )
        for one, other in same:
            np.testing.assert_array_equal(one, other)
        found: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(rounds + _WARM):
            names = list(programs)
            for name in names[turn % 3 :] + names[: turn % 3]:
                dist.barrier()
                begin = time.perf_counter()
                jax.block_until_ready(programs[name](x))
                took = np.array([time.perf_counter() - begin])
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn >= _WARM:
                    found[name].append(float(took[0]))
        if rank == 0:
            row = "  ".join(f"{k} {1e3 * statistics.median(v):8.2f}" for k, v in found.items())
            load = os.getloadavg()[0]
            print(f"{length:6} places  {row}  ({rounds} rounds, load {load:.1f})", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    given = sys.argv[1:]
    round_trip = float(given[0]) / 1e3 if given else 0.0
    rounds = int(given[1]) if len(given) > 1 else 7
    places = [int(word) for word in given[2:]] or [128, 512]
    network = Network(2, round_trip) if round_trip else None
    addresses = network.addresses if network else ["127.0.0.1", "127.0.0.1"]
    ranks: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(2):
            words = [json.dumps([rank, rounds, addresses, places])]
            command = [sys.executable, "-m", "tests.benchmarks.delay.ring_in_jit", *words]
            ranks.append(network.start(rank, command) if network else subprocess.Popen(command))
        for process in ranks:
            process.wait(500)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        if network is not None:
            network.close()


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        rank_main(*json.loads(sys.argv[1]))
    else:
        main()
