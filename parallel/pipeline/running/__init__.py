"""A step of a pipeline: microbatches, messages, and the executor."""
