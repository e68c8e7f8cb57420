"""One-sided windows: arrays that the other members of a group can read and change by themselves."""
