"""The hierarchical transport: inside each host by shared memory, between hosts by TCP."""

from transport.hierarchical.communicator import HierarchicalCommunicator

__all__ = ["HierarchicalCommunicator"]
