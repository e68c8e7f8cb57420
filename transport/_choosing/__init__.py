"""The choice of an algorithm by its cost, and the peers of each algorithm."""
