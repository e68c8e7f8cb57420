"""What programs have in common that run with the compiled core on some ranks and not on others."""

from __future__ import annotations

import pytest

from transport.native import core

NEEDS_CORE = [
    pytest.mark.processes,
    pytest.mark.skipif(core is None, reason="this installation has no compiled core"),
]

JOIN = """
    import os, random, sys, threading, time
    if os.environ["RANK"] in os.environ.get("PURE", "").split(","):
        os.environ["MESHLIB_NATIVE"] = "0"
    import numpy as np
    import meshlib as dist
    from transport.native import core

    dist.init_process_group("shm", timeout=20)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    SUM, AVG, PRODUCT, MIN, MAX = (
        getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    )
"""
"""Joins a job in shared memory; the ranks in ``PURE`` without the core."""
