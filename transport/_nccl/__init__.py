"""NCCL: collectives among GPUs, with a separate GPU for each rank.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from transport._nccl.communicator import NcclCommunicator, make_communicator

__all__ = ["NcclCommunicator", "make_communicator"]
