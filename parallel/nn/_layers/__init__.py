"""Layers, each with its backward pass."""
