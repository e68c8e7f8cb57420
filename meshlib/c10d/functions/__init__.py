"""c10d's functions: each finds the group and calls its method of the same name.

A function and its method share their words. They are written at the method;
``tests/docs/shared_docstrings.py`` copies them (``make format``), and a test compares.
"""
