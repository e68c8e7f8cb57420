"""The segment that all members share, and waiting on its words."""
