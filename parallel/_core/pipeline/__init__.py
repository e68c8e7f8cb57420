"""Pipeline schedules as tables, and their executor."""
