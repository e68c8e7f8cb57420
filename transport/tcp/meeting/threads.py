"""The threads in which one communicator connects while it does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transport.deadline import Deadline

_JOIN_SECONDS = 5.0


class Threads:
    """Begun by whoever makes a call, one thread at a time; joined once, at the end."""

    def __init__(self) -> None:
        self._begun: tuple[threading.Thread, ...] = ()

    def begin(self, name: str, task: Callable[[], None]) -> None:
        """Run ``task`` in a daemon thread. Raises RuntimeError where there is no room for one."""
        thread = threading.Thread(target=task, name=name, daemon=True)
        thread.start()
        self._begun = (*(other for other in self._begun if other.is_alive()), thread)

    def join(self) -> None:
        """Wait, for some seconds at most, until all have ended: what they do was broken off."""
        deadline = Deadline.after(_JOIN_SECONDS)
        for thread in self._begun:
            thread.join(deadline.remaining())
