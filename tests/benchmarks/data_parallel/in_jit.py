"""The cost of a small collective inside a jitted program, beyond the program's own cost.

    meshrun --nproc-per-node 2 -m tests.benchmarks.data_parallel.in_jit

Programs with 0, 1 and 20 all_reduces of one float64 (8 bytes), each of the last one's result, and
as many calls on NumPy arrays outside of ``jit``, take turns. What a call costs is the difference
between 20 and 1 divided by 19, of the medians of the slowest rank of each run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshlib as dist
from meshlib import jit as mj

_CALLS = (0, 1, 20)
_ROUNDS, _RUNS, _WARMUP = 20, 20, 3


def _inside(calls: int) -> Callable[[], Any]:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(calls):
            x = mj.all_reduce(x, dist.ReduceOp.AVG) + 1
        return x

    program, one = jax.jit(step), jnp.ones(1)

    def run() -> Any:
        return jax.block_until_ready(program(one))

    return run


def _outside(calls: int) -> Callable[[], Any]:
    def step() -> Any:
        x = np.ones(1)
        for _ in range(calls):
            dist.all_reduce(x, dist.ReduceOp.AVG)
            x += 1
        return x

    return step


def _run(step: Callable[[], Any], calls: int) -> list[float]:
    """Return the seconds of each run. Raises RuntimeError for a wrong result."""
    seconds: list[float] = []
    for run in range(-_WARMUP, _RUNS):
        dist.barrier()
        began = time.perf_counter()
        result = step()
        took = time.perf_counter() - began
        if np.asarray(result)[0] != 1 + calls:
            raise RuntimeError(f"{calls} averages of 1, plus 1 each: got {result}")
        if run >= 0:
            seconds.append(took)
    return seconds


def main() -> None:
    """Measure; rank 0 prints microseconds."""
    jax.config.update("jax_enable_x64", True)  # pyright: ignore[reportUnknownMemberType]
    dist.init_process_group()
    ways = {"in jit": _inside, "outside": _outside}
    steps = {(way, calls): make(calls) for way, make in ways.items() for calls in _CALLS}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for _ in range(_ROUNDS):
        for (way, calls), step in steps.items():
            seconds[way, calls] += _run(step, calls)
    slowest = {
        key: 1e6 * statistics.median(dist.all_reduce(np.array(took), dist.ReduceOp.MAX))
        for key, took in seconds.items()
    }
    for way in ways if dist.get_rank() == 0 else ():
        none, one, most = (slowest[way, calls] for calls in _CALLS)
        each = (most - one) / (_CALLS[-1] - _CALLS[-2])
        print(
            f"{way}: {none:.0f} µs without a call, {one:.0f} with one,"
            f" {each:.1f} for each further one"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
