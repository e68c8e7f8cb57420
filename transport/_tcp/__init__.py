"""The TCP transport: one connection for each pair of members that talk, in each group."""

from transport._tcp.communicator import TcpCommunicator

__all__ = ["TcpCommunicator"]
