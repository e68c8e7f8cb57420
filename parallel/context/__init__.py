"""Attention over sequences that are split over the ranks of one mesh dimension."""

from parallel._core.attention.places import sequence_positions, split_sequence
from parallel.context._all_to_all import UlyssesAttention
from parallel.context._parallelize import context_parallel
from parallel.context._ring import RingAttention

__all__ = [
    "RingAttention",
    "UlyssesAttention",
    "context_parallel",
    "sequence_positions",
    "split_sequence",
]
