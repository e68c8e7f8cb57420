"""``meshlib bench``: measures collectives of meshlib and other libraries in one run."""
