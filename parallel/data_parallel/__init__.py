"""Data parallel training on several devices of one process."""

from parallel.data_parallel.wrapper import DataParallel

__all__ = ["DataParallel"]
