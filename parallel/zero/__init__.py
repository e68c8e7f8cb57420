"""Sharding of optimizer states over replicas.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", arXiv:1910.02054, stage 1. Gradients are averaged as usual. Each rank stores the states of
its share of the parameters and updates these; then the ranks exchange the results.
"""

from parallel.zero._optimizer import ZeroRedundancyOptimizer
from parallel.zero._transformation import ZeroRedundancyOptax

__all__ = ["ZeroRedundancyOptax", "ZeroRedundancyOptimizer"]
