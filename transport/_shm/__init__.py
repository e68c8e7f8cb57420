"""Collectives and messages through shared memory, for members on one host."""

from transport._shm.communicator import ShmCommunicator as ShmCommunicator

__all__ = ["ShmCommunicator"]
