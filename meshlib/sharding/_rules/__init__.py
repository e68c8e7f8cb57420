"""NumPy's functions on DArrays; ``table`` has the list."""
