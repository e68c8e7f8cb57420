"""A transport over MPI, via mpi4py: an optional extra, and an example of a third party's.

MPI moves the bytes; algorithms, fingerprints, order of reduction and deadlines are ours, so that
results have the same bits and errors the same meaning as over every other transport.
"""

from transport._mpi.communicator import MpiCommunicator, make_alone

__all__ = ["MpiCommunicator", "make_alone"]
