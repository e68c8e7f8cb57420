"""A running job, seen: on a page, in a terminal, as metrics. Launchers use it: it has no NumPy."""
