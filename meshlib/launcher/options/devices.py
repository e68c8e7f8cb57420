"""How many ranks a node has room for, when it is asked to find out."""

from __future__ import annotations

import os
import re

_GPU_NODE = re.compile(r"nvidia\d+")


def count_cpus() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def count_gpus(devices: str = "/dev") -> int:
    """Return the number of NVIDIA GPUs that ranks here would see, without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        present = sum(1 for name in os.listdir(devices) if _GPU_NODE.fullmatch(name))
    except OSError:
        present = 0
    if visible is None:
        return present
    # A negative or empty entry ends the list; a GPU may be named by number or UUID.
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return min(count, present)
