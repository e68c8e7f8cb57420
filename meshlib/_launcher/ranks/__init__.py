"""A node's ranks: their processes, output and exits."""
