"""Data parallel training on several devices of one process.

Experimental, not run on a GPU (``docs/gpu.md``).
"""

from parallel.data_parallel._wrapper import DataParallel

__all__ = ["DataParallel"]
