"""From one sharding to another: the plan, as arithmetic, and what carries it out."""
