"""The store in a file: a log of the commands that every user runs on its own table."""
