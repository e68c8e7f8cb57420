"""What NumPy's functions do with DArrays; ``table`` has the list."""
