"""The TCP transport, with separate connections for each group and pair of members."""

from transport._tcp.communicator import TcpCommunicator

__all__ = ["TcpCommunicator"]
