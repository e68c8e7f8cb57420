"""NCCL: collectives among GPUs, each rank with one of its own.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from transport._nccl.communicator import NcclCommunicator, make_communicator

__all__ = ["NcclCommunicator", "make_communicator"]
