"""How members find and connect to each other."""
