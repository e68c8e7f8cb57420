"""Distributed training of JAX programs. Only this part of the package needs JAX."""

from parallel.jax import fsdp
from parallel.jax._context import (
    ring_attention,
    sequence_positions,
    split_sequence,
    ulysses_attention,
)
from parallel.jax._data_parallel import DistributedDataParallel
from parallel.jax._experts import (
    balance_loss,
    exchange,
    grouped_matmul,
    mixture,
    route,
    with_loss,
)
from parallel.jax._pipeline import PipelineStage, StageStates
from parallel.jax._tensor_parallel import (
    SplitWeight,
    SummedParameter,
    copy_to_region,
    gather_from_region,
    parallelize,
    reduce_from_region,
    scatter_to_region,
    share_input,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)

__all__ = [
    "DistributedDataParallel",
    "PipelineStage",
    "SplitWeight",
    "StageStates",
    "SummedParameter",
    "balance_loss",
    "copy_to_region",
    "exchange",
    "fsdp",
    "gather_from_region",
    "grouped_matmul",
    "mixture",
    "parallelize",
    "reduce_from_region",
    "ring_attention",
    "route",
    "scatter_to_region",
    "sequence_positions",
    "share_input",
    "split_sequence",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "with_loss",
]
