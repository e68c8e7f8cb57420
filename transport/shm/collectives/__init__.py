"""Collectives over the board: plans, what runs them, and the small calls that have none."""
