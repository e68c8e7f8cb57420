"""Counters of what a process does: the bytes that it copies and sends, and its system calls."""
