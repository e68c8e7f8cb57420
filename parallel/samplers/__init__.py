"""Each replica's share of a dataset."""

from parallel.samplers.batches import Batch, DistributedBatchSampler
from parallel.samplers.distributed import DistributedSampler
from parallel.samplers.loaders import EpochIndices, EpochView, GrainSampler, IndexBatches
from parallel.samplers.permutation import Order, Permutation
from parallel.samplers.variants import LengthGroupedSampler, WeightedDistributedSampler

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
