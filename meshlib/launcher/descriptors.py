"""Waiting for one file descriptor."""

from __future__ import annotations

import select


def readable(descriptor: int, timeout: float | None) -> bool:
    """Wait up to ``timeout`` seconds (None: without end) for something to read, or an end.

    Unlike ``select`` it takes descriptors beyond 1023.
    """
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if timeout is None else max(timeout, 0.0) * 1000))
