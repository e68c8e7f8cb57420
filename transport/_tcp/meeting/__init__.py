"""Members find and connect to each other."""
