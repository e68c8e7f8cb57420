"""Frames between the members of a group, in both directions, outside of collectives."""
