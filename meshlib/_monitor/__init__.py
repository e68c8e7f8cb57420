"""Monitoring of a running job: a page, a terminal view and metrics. Must not import NumPy."""
