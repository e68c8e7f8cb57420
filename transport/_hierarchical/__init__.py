"""Groups over several hosts: shared memory inside each host, TCP between hosts."""

from transport._hierarchical.communicator import HierarchicalCommunicator

__all__ = ["HierarchicalCommunicator"]
