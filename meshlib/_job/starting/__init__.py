"""The beginning of a job: ``init_process_group``, and how a rank finds the other ranks."""
