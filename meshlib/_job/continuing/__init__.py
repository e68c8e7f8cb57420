"""Continuing a job with a changed set of ranks: agreement, epochs, waiting for a place."""
