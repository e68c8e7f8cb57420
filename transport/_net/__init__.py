"""Sockets: connecting, authentication, encryption, event loops."""

LOOPBACK = "127.0.0.1"
"""The address that only processes of this machine can reach."""
