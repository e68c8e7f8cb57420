"""The base of all communicators: their interface, the state that a rank's share, a registry."""
