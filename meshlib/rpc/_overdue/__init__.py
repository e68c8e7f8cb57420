"""Deadlines of calls, and cycles of waiting calls."""
