"""From one sharding to another: the plan, as arithmetic, and its execution."""
