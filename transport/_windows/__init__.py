"""The memory of one-sided windows: what reaches it by load and store, and what by messages."""
