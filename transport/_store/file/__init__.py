"""The store in a file: a log of commands, which every user replays on its own table."""
