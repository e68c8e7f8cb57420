"""Gradients in 16 bits, and post-local SGD.

In 16 bits each rank rounds its gradients once; their average is computed in float32 and rounded
once more. Post-local SGD (Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local
SGD", arXiv:1808.07217) averages gradients in small groups only after a warm-up. Between the groups
parameters are averaged, every few steps: see ``parallel.averaging``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshlib import Future, ProcessGroup
from parallel._checks import check_callable, to_count
from parallel._core.comm_hooks import (
    CommHook,
    GradBucket,
    allreduce_hook,
    check_state,
    compress_wrapper,
    noop_hook,
)
from parallel._groups import Ranks, resolve


def fp16_compress_hook(process_group: Ranks | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket in float16: 11 bits of precision, nothing above 65504.

    ``process_group``: ``mesh["dp"]``, a group, or None for the wrapper's own.
    """
    return compress_wrapper(allreduce_hook, np.float16)(process_group, bucket)


def bf16_compress_hook(process_group: Ranks | None, bucket: GradBucket) -> Future[Any]:
    """Average the bucket in bfloat16: 8 bits of precision, the range of float32.

    ``process_group``: ``mesh["dp"]``, a group, or None for the wrapper's own. Needs the package
    ml_dtypes: raises ImportError without it.
    """
    return compress_wrapper(allreduce_hook, _bfloat16())(process_group, bucket)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return ``hook`` run on the bucket in float16, such as ``powerSGD_hook``.

    Raises TypeError for what cannot be called.
    """
    check_callable(hook, "hook")
    return compress_wrapper(hook, np.float16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return ``hook`` run on the bucket in bfloat16. Needs the package ml_dtypes.

    Raises TypeError for what cannot be called, ImportError without that package.
    """
    check_callable(hook, "hook")
    return compress_wrapper(hook, _bfloat16())


def _bfloat16() -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError("bfloat16 needs the package ml_dtypes; install it") from error
    return np.dtype(ml_dtypes.bfloat16)


class PostLocalSGDState:
    """What ``post_localSGD_hook`` needs to know.

    Args:
        process_group: all replicas, for the first steps; None: the default group.
        subgroup: the replicas that go on averaging gradients, such as ``mesh["dp_shard"]``, the
            ranks of one host.
        start_localSGD_iter: how many steps average over all replicas.
        post_local_gradient_allreduce: whether the subgroup averages after that, or nobody does.

    Raises ValueError for a negative ``start_localSGD_iter``, TypeError for arguments of another
    type.
    """

    def __init__(
        self,
        process_group: Ranks | None,
        subgroup: Ranks | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.start_localSGD_iter: int = to_count(start_localSGD_iter, "start_localSGD_iter", 0)
        self.process_group: ProcessGroup = resolve(process_group, "process_group")
        self.subgroup: ProcessGroup = resolve(subgroup, "subgroup")
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iteration = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Any]:
    """Average the bucket over all replicas at first, later over the subgroup.

    Raises TypeError for a ``state`` that is no ``PostLocalSGDState``.
    """
    check_state(state, PostLocalSGDState, "post_localSGD_hook")
    warming_up = state.iteration < state.start_localSGD_iter
    if bucket.is_last():
        state.iteration += 1
    if warming_up:
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce or state.subgroup.size() == 1:
        return noop_hook(None, bucket)
    bucket.set_group(state.subgroup)
    return allreduce_hook(state.subgroup, bucket)
