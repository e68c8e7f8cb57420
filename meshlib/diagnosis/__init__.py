"""What a job knows about itself: the flight record, the stacks, who stands still, what failed."""
