"""Schedules: each is a function that returns its table."""
