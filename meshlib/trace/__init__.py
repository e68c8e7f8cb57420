"""Flight records after the fact: dumps of all ranks, merged, explained and drawn."""

RECORDS = "rank*.json"
"""How the ranks' files are called. It is here for the launcher, which does without NumPy."""
