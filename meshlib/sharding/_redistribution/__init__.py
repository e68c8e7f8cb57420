"""Redistribution from one sharding to another: the plan, and its execution."""
