"""A launch's options: from the command line, the engine and the node."""
