"""A schedule as data: actions, tables of them, and what they cost."""
