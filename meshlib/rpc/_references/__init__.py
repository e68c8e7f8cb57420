"""References to objects on workers: the holders' side and the owners' side."""
