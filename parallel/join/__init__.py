"""Training on inputs that run out sooner on some ranks than on others."""

from parallel.join.context import Join
from parallel.join.joinable import Joinable, JoinHook, OptimizerReplica

__all__ = ["Join", "JoinHook", "Joinable", "OptimizerReplica"]
