"""The shared-memory transport: for members on one host, at the speed of memory."""

from transport.shm.communicator import ShmCommunicator

__all__ = ["ShmCommunicator"]
