"""Processes of one host find each other and hand over segments."""
