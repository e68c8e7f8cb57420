"""Gradients through remote calls, and training with them.

For functions of JAX arrays and for ``parallel.nn`` modules. The names are those of
``torch.distributed.autograd``, ``torch.distributed.optim`` and ``torch.distributed.nn``.
"""

from meshlib import rpc
from parallel.rpc import dist_autograd
from parallel.rpc._forward import Weights
from parallel.rpc._gradients import Gradients
from parallel.rpc._recorded import Recorded
from parallel.rpc._remote import DistributedOptimizer, RemoteModule

__all__ = ["DistributedOptimizer", "Recorded", "RemoteModule", "Weights", "dist_autograd"]

rpc.differentiate_by(Gradients)
