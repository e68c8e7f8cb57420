"""Gradient averaging in a program for a GPU, by collectives on the program's stream.

Experimental, not run on a GPU (``docs/run/gpu.md``).

Unlike on the CPU, no host thread receives the gradients: the program enqueues the collectives on
its stream after the gradients. All gradients of one dtype share buckets, as elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

import meshlib.jit as mj
from meshlib import ProcessGroup, ReduceOp
from parallel._arrays import pieces
from parallel._core.assignment import assign_buckets


def is_on_gpu(leaves: Sequence[jax.Array]) -> bool:
    """True if any array is on a GPU, for which XLA then compiles the program."""
    return any(device.platform in ("gpu", "cuda") for leaf in leaves for device in leaf.devices())


def average_in_program(
    gradients: Sequence[jax.Array], group: ProcessGroup, cap_bytes: int
) -> list[jax.Array]:
    """Return the averages of ``gradients`` over ``group``, inside a program.

    The first buckets (of about ``cap_bytes``) hold the last gradients, which are computed first.
    """
    averages = list(gradients)
    for numbers in _buckets(gradients, cap_bytes):
        flat = jnp.concatenate([gradients[number].reshape(-1) for number in numbers])
        average = mj.all_reduce(flat, ReduceOp.AVG, group)
        parts = pieces(average, (gradients[number].shape for number in numbers))
        for number, part in zip(numbers, parts, strict=True):
            averages[number] = part
    return averages


def _buckets(gradients: Sequence[jax.Array], cap_bytes: int) -> list[list[int]]:
    return assign_buckets(
        range(len(gradients))[::-1],
        [gradient.size * gradient.dtype.itemsize for gradient in gradients],
        [gradient.dtype for gradient in gradients],
        cap_bytes,
        cap_bytes,
    )
