"""Layers split over the ranks of one mesh dimension, and plans by which models are."""

from parallel.tensor_parallel._embedding import VocabParallelEmbedding
from parallel.tensor_parallel._linear import ColumnParallelLinear, RowParallelLinear
from parallel.tensor_parallel._loss import VocabParallelCrossEntropyLoss
from parallel.tensor_parallel._parallelize import parallelize
from parallel.tensor_parallel._prepare import PrepareModuleInput, PrepareModuleOutput
from parallel.tensor_parallel._styles import (
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
