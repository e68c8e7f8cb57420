"""What a rank records of its calls: the flight record, stacks, the log."""
