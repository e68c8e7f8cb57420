"""Remote calls in functions that JAX transforms: differentiates, compiles, batches."""
