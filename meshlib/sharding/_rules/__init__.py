"""NumPy's functions on DArrays; ``table`` lists them."""
