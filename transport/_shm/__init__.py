"""Collectives and messages through shared memory, for members on one host."""

from transport._shm.communicator import ShmCommunicator as ShmCommunicator
from transport._shm.support import unsupported_reason as unsupported_reason

__all__ = ["ShmCommunicator", "unsupported_reason"]
