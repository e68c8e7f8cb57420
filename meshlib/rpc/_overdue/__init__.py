"""Calls past their deadlines, and calls that wait for each other in a cycle."""
