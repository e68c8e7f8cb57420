"""One-sided windows: arrays that members access without a call of the owner."""
