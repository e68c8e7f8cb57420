"""What every communicator is and has: the interface, what a rank's share, their registry."""
