"""What the ranks of the GPU tests do. Run by ``meshrun``: ``gpu_ranks.py BACKEND WHAT``."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

import meshlib as dist

# Long enough that a collective which does not wait for it reads the old values.
_DELAY_PASSES = 200


def delayed(cupy: Any, array: Any, value: float) -> None:
    """Fill ``array`` with garbage now and with ``value`` much later, on the current stream."""
    array.fill(np.nan)
    burn = cupy.ones((2048, 2048), cupy.float32)
    for _ in range(_DELAY_PASSES):
        burn = burn @ burn * 1e-4
    array.fill(value)


def check_values(cupy: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "complex64", "bool"):
        for count in (1, 7, 1000, 1_000_003):
            x = (cupy.arange(count) % 2 + rank % 2).astype(dtype)
            wanted = sum(
                ((np.arange(count) % 2 + r % 2).astype(dtype) for r in range(size)),
                np.zeros(count, dtype),
            )
            dist.all_reduce(x)
            assert np.array_equal(x.get(), wanted), (dtype, count)
    x = cupy.full((3, 5), rank, cupy.int32)
    out = cupy.empty((size, 3, 5), cupy.int32)
    dist.all_gather_into_tensor(out, x)
    assert (out.get() == np.arange(size).reshape(size, 1, 1)).all()
    part = cupy.empty((3, 5), cupy.int32)
    dist.reduce_scatter_tensor(part, out)
    assert (part.get() == size * rank).all()
    dist.broadcast(x, src=size - 1)
    assert (x.get() == size - 1).all()
    ins = [cupy.full(4 + rank, 10 * rank + j, cupy.float32) for j in range(size)]
    outs = [cupy.empty(4 + i, cupy.float32) for i in range(size)]
    dist.all_to_all(outs, ins)
    assert all((outs[i].get() == 10 * i + rank).all() for i in range(size))
    strided = cupy.ones((6, 8), cupy.float32)[::2, ::2]
    dist.all_reduce(strided)
    assert (strided.get() == size).all()


def check_streams(cupy: Any) -> None:
    """Fails if a collective does not wait for the array's stream, or later work not for it."""
    size = dist.get_world_size()
    for count in (100, 4_000_000):
        for blocking in (True, False):
            with cupy.cuda.Stream(non_blocking=True):
                x = cupy.empty(count, cupy.float32)
                delayed(cupy, x, 1.0)
                if blocking:
                    dist.all_reduce(x)
                else:
                    dist.all_reduce(x, async_op=True).wait()
                x += 0.5
                assert (x.get() == size + 0.5).all()


def check_jax(cupy: Any) -> None:
    jax = import_module("jax")
    x = jax.device_put(np.ones(1000, np.float32), jax.devices("gpu")[0])
    y = dist.all_reduce(x * 2)
    assert (np.asarray(y + 1) == 2 * dist.get_world_size() + 1).all()
    assert (np.asarray(x) == 1).all()


def main() -> None:
    backend, what = sys.argv[1:]
    cupy = import_module("cupy")
    dist.init_process_group(f"cpu:auto,cuda:{backend}", timeout=60)
    {"values": check_values, "streams": check_streams, "jax": check_jax}[what](cupy)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
