"""Training with different numbers of inputs on the ranks."""

from parallel.join._context import Join, Joinable, JoinHook, OptimizerReplica

__all__ = ["Join", "JoinHook", "Joinable", "OptimizerReplica"]
