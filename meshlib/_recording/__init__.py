"""A rank's records of its calls: the flight record, stacks, and the log."""
