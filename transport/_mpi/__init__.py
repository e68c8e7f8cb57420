"""A transport over MPI through mpi4py: an optional extra, and an example of a new transport.

MPI only moves the bytes. Algorithms, headers, reduction order and deadlines are those of all other
transports, and so are the bits of the results and the errors.
"""

from transport._mpi.communicator import MpiCommunicator, make_alone

__all__ = ["MpiCommunicator", "make_alone"]
