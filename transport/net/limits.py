"""What the system refuses this process, in words that name the limit."""

from __future__ import annotations

import errno
import resource


def explain(error: Exception) -> str:
    """Return why ``error`` was raised: with the limit that was met, if it is one."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"this process has no file descriptor left: its limit is {most} (ulimit -n)"
    if number == errno.ENFILE:
        return "this machine has no file descriptor left (sysctl fs.file-max)"
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        return "this process cannot start another thread (ulimit -u, or pids.max of its cgroup)"
    return str(error)
