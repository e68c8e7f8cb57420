"""Sockets: made, authenticated, encrypted, waited for."""

LOOPBACK = "127.0.0.1"
"""This machine, as only its own processes reach it."""
