"""The measured processes: one job for each library, and its ranks."""
