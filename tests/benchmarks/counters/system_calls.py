"""Counts the system calls of running processes with ``perf stat``, which hardly disturbs them."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_EVENTS = ("raw_syscalls:sys_enter", "context-switches")
_ANSWER_SECONDS = 10.0
_COMPLAINT = 200  # characters


class CannotCountError(RuntimeError):
    """System calls cannot be counted here; the message says why."""


@dataclass(slots=True)
class SystemCalls:
    """The system calls of all processes inside the block."""

    calls: int = 0
    switches: int = 0


@contextmanager
def system_calls(pids: Sequence[int], folder: Path) -> Generator[SystemCalls]:
    """Count in the block what ``pids`` do; raise CannotCountError where perf cannot.

    ``folder`` is for files of the measurement.
    """
    perf = shutil.which("perf")
    if perf is None:
        raise CannotCountError("perf is not installed")
    control, answers, output = (folder / name for name in ("control", "answers", "output"))
    for path in (control, answers):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    ends = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in (control, answers)]
    events = [part for event in _EVENTS for part in ("-e", event)]
    command = [perf, "stat", "-x", ",", "-D", "-1", *events, "-o", str(output)]
    command += ["--control", f"fifo:{control},{answers}", "-p", ",".join(map(str, pids))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    found = SystemCalls()
    try:
        _command(process, ends, b"enable\n")
        yield found
        _command(process, ends, b"disable\n")
        process.send_signal(signal.SIGINT)
        process.wait(_ANSWER_SECONDS)
        numbers = _read(output)
        found.calls, found.switches = (numbers[event] for event in _EVENTS)
    except (KeyError, ValueError, subprocess.TimeoutExpired) as error:
        raise CannotCountError(f"perf gave no count: {error!r}") from error
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
        for fd in ends:
            os.close(fd)


def _command(process: subprocess.Popen[bytes], ends: Sequence[int], command: bytes) -> None:
    os.write(ends[0], command)
    ready: list[int] = []
    for _ in range(int(_ANSWER_SECONDS / 0.1)):
        ready = select.select([ends[1]], [], [], 0.1)[0]
        if ready or process.poll() is not None:
            break
    if not ready:
        process.kill()
        assert process.stderr is not None
        complaint = " ".join(process.stderr.read().decode(errors="replace").split())
        reason = complaint[:_COMPLAINT] or "it does not answer"
        raise CannotCountError(f"perf does not count here: {reason}")
    os.read(ends[1], 64)


def _read(output: Path) -> dict[str, int]:
    """Return the counts by event: lines of ``count,unit,event,…``."""
    rows = (line.split(",") for line in output.read_text().splitlines() if "," in line)
    return {row[2]: int(row[0]) for row in rows if len(row) > 2}
