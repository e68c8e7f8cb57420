"""The processes that are measured: one job for each library, and its ranks."""
