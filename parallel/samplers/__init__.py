"""Samplers, which distribute a dataset over replicas."""

from parallel.samplers._distributed import Batch, DistributedBatchSampler, DistributedSampler
from parallel.samplers._loaders import EpochIndices, EpochView, GrainSampler, IndexBatches
from parallel.samplers._orders import Order, Permutation
from parallel.samplers._variants import LengthGroupedSampler, WeightedDistributedSampler

__all__ = [
    "Batch",
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochIndices",
    "EpochView",
    "GrainSampler",
    "IndexBatches",
    "LengthGroupedSampler",
    "Order",
    "Permutation",
    "WeightedDistributedSampler",
]
