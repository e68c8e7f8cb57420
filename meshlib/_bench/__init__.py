"""``meshlib bench``: measures collectives beside other libraries in the same run."""
