"""Tensor parallelism: layers split over the ranks of one mesh dimension, by a plan."""

from parallel.tensor_parallel._parallelize import (
    PrepareModuleInput,
    PrepareModuleOutput,
    parallelize,
)
from parallel.tensor_parallel._styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from parallel.tensor_parallel._vocab import VocabParallelCrossEntropyLoss

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallelCrossEntropyLoss",
    "parallelize",
]
