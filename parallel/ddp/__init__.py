"""Distributed data parallel training."""

from parallel.ddp.buckets import GradBucket
from parallel.ddp.comm_hooks import CommHook, allreduce_hook, noop_hook
from parallel.ddp.data_parallel import DistributedDataParallel
from parallel.ddp.statistics import PassStatistics
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
