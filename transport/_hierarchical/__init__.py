"""Groups over several hosts: inside each host by shared memory, between hosts by TCP."""

from transport._hierarchical.communicator import HierarchicalCommunicator

__all__ = ["HierarchicalCommunicator"]
