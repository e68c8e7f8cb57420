"""Meshes: layouts, names, slices, configs."""
