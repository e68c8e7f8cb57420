"""What each kind of parallelism does to plain arrays: it knows neither modules nor JAX."""
