"""The store over TCP: its wire format, server and clients."""
