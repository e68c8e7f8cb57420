"""``meshlib bench``: collectives measured, beside those of other libraries in the same run."""
