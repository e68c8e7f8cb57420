"""A node's ranks: their processes, their output, their ends."""
