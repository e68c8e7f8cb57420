"""Which workers there are, and how they leave."""
