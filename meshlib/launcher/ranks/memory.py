"""How often the kernel has killed a process because memory was short."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
HINT = "probably the kernel's out-of-memory killer, which has just struck"


def oom_kills() -> int:
    """Return how many processes it has killed in this process's memory cgroup, or, where that does
    not say, on this machine; 0 where nothing does.

    Only that the number rises means anything.
    """
    for path in _counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _counters() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            # In a container the path may begin above what is mounted here: then it is the root.
            for inside in (place.lstrip("/"), ""):
                if not controllers:
                    yield _CGROUPS / inside / "memory.events"
                elif "memory" in controllers.split(","):
                    yield _CGROUPS / "memory" / inside / "memory.oom_control"
    yield Path("/proc/vmstat")
