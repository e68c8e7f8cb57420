"""Attention over sequences that are split over the ranks of one mesh dimension."""

from parallel._core.attention.ring import sequence_positions, split_sequence
from parallel.context._attention import RingAttention, UlyssesAttention, context_parallel

__all__ = [
    "RingAttention",
    "UlyssesAttention",
    "context_parallel",
    "sequence_positions",
    "split_sequence",
]
