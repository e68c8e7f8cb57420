"""Post-local SGD: after a warm-up, gradients are averaged in small groups only.

Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", arXiv:1808.07217.
Between the groups it is the parameters that are averaged, every few steps: see
``parallel.averaging``.
"""

from __future__ import annotations

from typing import Any

from meshlib import Future, ProcessGroup
from parallel._checks import to_count
from parallel._core.comm_hooks import allreduce_hook, check_state, noop_hook
from parallel._core.grad_bucket import GradBucket
from parallel._groups import Ranks, resolve


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
