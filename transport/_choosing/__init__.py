"""The choice of an algorithm by its cost, and the peers with which it exchanges frames."""
