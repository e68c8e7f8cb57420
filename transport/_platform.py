"""Linux's system calls, and their portable replacements.

This module does not check the system's name, only whether Python has a function. Shared memory
among processes needs Linux (``transport._shm.support``).
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from contextlib import suppress

KEEPALIVE_IDLE: int = (
    socket.TCP_KEEPIDLE
    if hasattr(socket, "TCP_KEEPIDLE")
    else getattr(socket, "TCP_KEEPALIVE", 0x10)
)
"""The TCP option for the seconds of silence after which the kernel probes a peer."""
SEND_NOW = int(socket.MSG_DONTWAIT) | int(getattr(socket, "MSG_NOSIGNAL", 0))
"""Flags of a send that does not block. Without MSG_NOSIGNAL, Python itself ignores SIGPIPE."""
_PROCESS_TABLE = "/proc"


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def thread_names() -> list[str] | None:
    """Return the kernel's names of this process's threads; None if the kernel hides them."""
    names: list[str] = []
    try:
        numbers = os.listdir("/proc/self/task")
    except OSError:
        return None
    for number in numbers:
        with suppress(OSError), open(f"/proc/self/task/{number}/comm", encoding="utf-8") as file:
            names.append(file.read().strip())
    return names


def same_file(descriptor: int, path: str) -> str:
    """Return a path at which the file behind ``descriptor`` can be opened again.

    On a system without ``/proc/self/fd``, return ``path``, from which the file was opened. The
    caller has to compare the two files.
    """
    named = f"/proc/self/fd/{descriptor}"
    return named if os.path.lexists(named) else path


# ---------------------------------------------------------------------- processes


def parents() -> dict[int, int]:
    """Return the parent of each process that has not ended."""
    try:
        names = os.listdir(_PROCESS_TABLE)
    except OSError:
        return _parents_by_ps()
    found: dict[int, int] = {}
    for name in filter(str.isdigit, names):
        with suppress(OSError), open(f"{_PROCESS_TABLE}/{name}/stat", "rb") as file:
            state, parent, *_ = file.read().rpartition(b")")[2].split()
            if state not in (b"Z", b"X"):
                found[int(name)] = int(parent)
    return found


def _parents_by_ps() -> dict[int, int]:
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,state="],  # noqa: S607 (the system's)
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {int(row[0]): int(row[1]) for row in rows if len(row) == 3 and row[2][0] not in "ZX"}


def environment_of(pid: int) -> list[bytes]:
    """Return the variables, as ``NAME=value``, with which process ``pid`` was started.

    Empty if the process has ended or is another user's, or if the system does not show them.
    """
    try:
        with open(f"{_PROCESS_TABLE}/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, if the kernel supports that."""
    import ctypes

    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


_PR_SET_CHILD_SUBREAPER = 36


def ended_child(candidates: list[int]) -> int | None:
    """Return a child of this process that has ended but was not reaped, or None.

    Without ``waitid``, check each of ``candidates``.
    """
    if hasattr(os, "waitid"):
        try:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        return None if child is None else child.si_pid
    running = parents()
    return next((pid for pid in candidates if pid not in running), None)


def wait_for_end(pid: int, timeout: float) -> bool:
    """Wait for process ``pid`` to end, at most ``timeout`` seconds; return whether it ended."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # the process is gone, or the kernel lacks pidfd: the caller checks again
        return True
    except AttributeError:
        end = time.monotonic() + timeout
        while pid in parents():
            if time.monotonic() >= end:
                return False
            time.sleep(0.02)
        return True
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    try:
        return bool(poller.poll(max(timeout, 0.0) * 1000))
    finally:
        os.close(handle)
