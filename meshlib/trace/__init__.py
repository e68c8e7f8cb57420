"""Flight records after the fact: dumps of all ranks, merged, explained and drawn."""

RECORDS = "rank*.json"
"""How the ranks' files are called. It is here for the launcher, which does without NumPy."""

HOW_TO_KEEP = (
    "meshrun --log-dir DIR keeps what each rank was doing when a job fails, and meshlib trace DIR"
    " explains it"
)
"""What to say where files are missing."""
