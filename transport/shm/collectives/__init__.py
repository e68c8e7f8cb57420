"""Collectives over the board: exchanges, reductions, copies."""
