"""Attention over sequences that are split over the ranks of one mesh dimension."""

from parallel.context.all_to_all import UlyssesAttention
from parallel.context.parallelize import context_parallel
from parallel.context.ring import RingAttention
from parallel.core.attention.places import sequence_positions, split_sequence

__all__ = [
    "RingAttention",
    "UlyssesAttention",
    "context_parallel",
    "sequence_positions",
    "split_sequence",
]
