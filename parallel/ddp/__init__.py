"""Distributed data parallel training."""

from parallel._core.comm_hooks import CommHook, GradBucket, allreduce_hook, noop_hook
from parallel._core.passes import PassStatistics
from parallel.ddp._data_parallel import DistributedDataParallel
from parallel.nn._precision import MixedPrecision

__all__ = [
    "CommHook",
    "DistributedDataParallel",
    "GradBucket",
    "MixedPrecision",
    "PassStatistics",
    "allreduce_hook",
    "noop_hook",
]
