"""The algorithms of each kind of parallelism on plain arrays, without modules or JAX."""
