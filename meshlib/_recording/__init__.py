"""A rank's records of its calls: the flight record, stacks, the log."""
