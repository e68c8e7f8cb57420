"""Error messages that name the system's limits, and the memory that is left."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_RECLAIMABLE = "inactive_file", "active_file", "slab_reclaimable"


def explain(error: Exception) -> str:
    """Return the message of ``error``, with the limit if this process has reached one."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has no file descriptor left: its limit is {most} (ulimit -n)"
    if number == errno.ENFILE:
        return "this machine has no file descriptor left (sysctl fs.file-max)"
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        return "this process cannot start another thread (ulimit -u, or pids.max of its cgroup)"
    return str(error)


def memory_cgroups() -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and its ancestors, of either version.

    A container may hide some of them. Each cgroup version has its own files.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CGROUPS / "memory" if controllers else _CGROUPS
            inside = root / place.lstrip("/")
            yield from (inside, *inside.parents[: len(inside.parts) - len(root.parts)])


def memory_left() -> tuple[int, str]:
    """Return the most bytes that this process can still allocate, and a description of the limit.

    Beyond the limit, the kernel kills a process. Other processes share the limit.
    """
    machine = _read_table(Path("/proc/meminfo"))
    swap = machine.get("SwapFree:", 0) << 10
    left = (machine.get("MemAvailable:", 1 << 50) << 10) + swap
    limit = f"this machine has {_mebibytes(left)} of memory left"
    for folder in memory_cgroups():
        for name, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                most = int((folder / name).read_text())  # ValueError: "max"
                used = int((folder / usage).read_text()) - _reclaimable(folder)
                there = most - used + min(swap, _swap_left(folder))
                if there < left:
                    left = max(there, 0)
                    limit = (
                        f"the limit of its cgroup is {_mebibytes(most)}, of which"
                        f" {_mebibytes(left)} are left ({folder / name})"
                    )
    return left, limit


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def _reclaimable(folder: Path) -> int:
    """Return the bytes that the kernel would reclaim first: file caches."""
    table = _read_table(folder / "memory.stat")
    names = [f"total_{name}" for name in _RECLAIMABLE]  # version 1: with the groups below
    if not any(name in table for name in names):
        names = [*_RECLAIMABLE]
    return sum(table.get(name, 0) for name in names)


def _swap_left(folder: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        most = int((folder / "memory.swap.max").read_text())
        return max(most - int((folder / "memory.swap.current").read_text()), 0)
    return 1 << 60


def _read_table(path: Path) -> dict[str, int]:
    """Return the table in a file of lines with a name and a number; empty if unreadable."""
    table: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            table[words[0]] = int(words[1])
    return table
