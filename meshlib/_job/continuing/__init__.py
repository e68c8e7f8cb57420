"""Continuing a job with other ranks: agreement, epochs, waiting for places."""
