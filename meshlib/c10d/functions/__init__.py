"""c10d's functions: each finds the group and calls its method of the same name.

A function and its method share their words, which are written at the method (``words``).
"""
