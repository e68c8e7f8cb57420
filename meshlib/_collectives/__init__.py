"""The collectives as methods of whatever is a group of ranks."""
