"""Training on a mesh."""

from parallel import nn, optim
from parallel.data_parallel import DataParallel
from parallel.ddp import (
    CommHook,
    DistributedDataParallel,
    GradBucket,
    MixedPrecision,
    allreduce_hook,
    noop_hook,
)
from parallel.join import Join, Joinable, JoinHook
from parallel.nn import Buffer, Module, Parameter
from parallel.samplers import (
    DistributedBatchSampler,
    DistributedSampler,
    LengthGroupedSampler,
    WeightedDistributedSampler,
)
from parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from parallel.zero import ZeroRedundancyOptax, ZeroRedundancyOptimizer

__all__ = [
    "Buffer",
    "ColwiseParallel",
    "CommHook",
    "DataParallel",
    "DistributedBatchSampler",
    "DistributedDataParallel",
    "DistributedSampler",
    "GradBucket",
    "Join",
    "JoinHook",
    "Joinable",
    "LengthGroupedSampler",
    "MixedPrecision",
    "Module",
    "Parameter",
    "RowwiseParallel",
    "WeightedDistributedSampler",
    "ZeroRedundancyOptax",
    "ZeroRedundancyOptimizer",
    "allreduce_hook",
    "nn",
    "noop_hook",
    "optim",
]
