"""c10d's functions: each finds the group and calls its method of the same name.

``tests/docs/functions.py`` generates them from the methods, with their types and docstrings. Change
the method, then run the script.
"""
