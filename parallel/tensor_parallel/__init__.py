"""Layers split over the ranks of one mesh dimension, and plans by which models are."""

from parallel.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
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
from parallel.tensor_parallel._vocab import VocabParallelCrossEntropyLoss, VocabParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "parallelize",
]
