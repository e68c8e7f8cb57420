"""Pipelines: schedules as tables, and the one executor of all of them."""
