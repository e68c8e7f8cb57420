"""Collectives as plans: who makes them, and what runs them."""
