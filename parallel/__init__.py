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
from parallel.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    zero_redundancy,
)
from parallel.join import Join, Joinable, JoinHook
from parallel.nn import Buffer, Module, Parameter
from parallel.samplers import (
    DistributedBatchSampler,
    DistributedSampler,
    LengthGroupedSampler,
    WeightedDistributedSampler,
)
from parallel.tensor_parallel import (
    ColumnParallelLinear,
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowParallelLinear,
    RowwiseParallel,
    SequenceParallel,
    VocabParallelCrossEntropyLoss,
    VocabParallelEmbedding,
    parallelize,
)
from parallel.zero import ZeroRedundancyOptax, ZeroRedundancyOptimizer

__all__ = [
    "Buffer",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "CommHook",
    "DataParallel",
    "DistributedBatchSampler",
    "DistributedDataParallel",
    "DistributedSampler",
    "FSDPModule",
    "GradBucket",
    "Join",
    "JoinHook",
    "Joinable",
    "LengthGroupedSampler",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "Module",
    "ParallelStyle",
    "Parameter",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "WeightedDistributedSampler",
    "ZeroRedundancyOptax",
    "ZeroRedundancyOptimizer",
    "allreduce_hook",
    "clip_grad_norm_",
    "fully_shard",
    "nn",
    "noop_hook",
    "optim",
    "parallelize",
    "zero_redundancy",
]
