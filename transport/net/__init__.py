"""Sockets: made, authenticated, encrypted, waited for."""
