"""What programs have in common that run in shared memory."""

from __future__ import annotations

import pytest

from transport._native import core

NEEDS_CORE = [
    pytest.mark.processes,
    pytest.mark.skipif(core is None, reason="this installation has no compiled core"),
]

JOIN = """
    import os, random, sys, threading, time
    import numpy as np
    import meshlib as dist
    from meshlib._collectives.group_of_ranks import call_queue_of
    from transport._native import core

    dist.init_process_group("shm", timeout=90)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    SUM, AVG, PRODUCT, MIN, MAX = (
        getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    )

    def interrupt_soon():
        # Once this program is in a call.
        records = call_queue_of(group).context.recorder.records

        def interrupt():
            while not any(not record.ended for record in records()):
                time.sleep(0.005)
            time.sleep(0.2)
            os.kill(os.getpid(), 2)

        threading.Thread(target=interrupt, daemon=True).start()

    def wait_for_news(of):
        # Until this rank knows that the group has failed.
        while call_queue_of(of).state.await_failure(1.0) is None:
            pass
"""
"""Joins a job in shared memory."""
