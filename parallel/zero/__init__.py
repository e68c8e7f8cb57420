"""Optimizer states that are sharded over the replicas: each rank keeps those of its parameters.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", arXiv:1910.02054, stage 1. Gradients are averaged as ever; each rank updates its share of
the parameters, and the ranks exchange the results.
"""

from parallel.zero._optimizer import ZeroRedundancyOptimizer
from parallel.zero._transformation import ZeroRedundancyOptax

__all__ = ["ZeroRedundancyOptax", "ZeroRedundancyOptimizer"]
