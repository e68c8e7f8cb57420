"""Collectives among ranks of one host, whose GPUs read each other's memory.

Experimental, not run on a GPU (``docs/run/gpu.md``).
"""

from transport._cuda_ipc.communicator import CudaIpcCommunicator, make_communicator

__all__ = ["CudaIpcCommunicator", "make_communicator"]
