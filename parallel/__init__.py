"""Distributed training on a device mesh."""

from typing import TYPE_CHECKING

from parallel import nn, optim
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
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    VocabParallelCrossEntropyLoss,
    parallelize,
)
from parallel.zero import ZeroRedundancyOptax, ZeroRedundancyOptimizer

__all__ = [
    "Buffer",
    "ColwiseParallel",
    "CommHook",
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
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallelCrossEntropyLoss",
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
]

if not TYPE_CHECKING:  # type checkers would accept every name as part of this package

    def __getattr__(name: str) -> object:
        if name == "DataParallel":  # torch.nn's, which PyTorch itself advises against
            raise ImportError(  # `from parallel import` drops the text of an AttributeError
                "parallel has no DataParallel (several GPUs of one process); expected"
                " DistributedDataParallel, with a process for each GPU"
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
