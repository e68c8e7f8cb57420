"""Pairwise exchanges: one step after the other, or ahead of what has come."""
