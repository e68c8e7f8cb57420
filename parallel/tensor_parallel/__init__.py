"""Layers split over the ranks of one mesh dimension."""

from parallel.tensor_parallel.linear import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel"]
