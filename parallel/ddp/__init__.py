"""Distributed data parallel training."""

from parallel.core.comm_hooks import CommHook, allreduce_hook, noop_hook
from parallel.core.grad_bucket import GradBucket
from parallel.core.statistics import PassStatistics
from parallel.ddp.data_parallel import DistributedDataParallel
from parallel.nn.precision import MixedPrecision

__all__ = [
    "CommHook",
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "PassStatistics",
    "allreduce_hook",
    "noop_hook",
]
