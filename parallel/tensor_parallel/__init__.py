"""Layers split over the ranks of one mesh dimension, and plans by which models are."""

from parallel.tensor_parallel.embedding import VocabParallelEmbedding
from parallel.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel.tensor_parallel.loss import VocabParallelCrossEntropyLoss
from parallel.tensor_parallel.parallelize import parallelize
from parallel.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleOutput
from parallel.tensor_parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

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
