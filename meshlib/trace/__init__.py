"""Flight records after the fact: dumps of all ranks, merged, explained and drawn."""
