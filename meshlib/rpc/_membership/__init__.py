"""The workers: their names, their losses, and the shutdown."""
