"""NCCL: collectives among GPUs, each rank with one of its own."""

from transport.nccl.communicator import NcclCommunicator, make_communicator

__all__ = ["NcclCommunicator", "make_communicator"]
