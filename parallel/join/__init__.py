"""Training on inputs that run out sooner on some ranks than on others."""

from parallel.join._context import Join, Joinable, JoinHook, OptimizerReplica

__all__ = ["Join", "JoinHook", "Joinable", "OptimizerReplica"]
