"""Waits: deadlines, Ctrl-C, polling, and spinning before a thread sleeps."""
