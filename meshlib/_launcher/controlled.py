"""A launcher that another process controls through its standard input.

The input begins with a ``LaunchOrder``, preceded by its length. Each later byte is the number of a
signal, which acts like that signal to the launcher. The end of the input counts as SIGHUP, so the
ranks end with the controlling process, even if that process is killed, and across ssh. The order
may contain secrets, because other users cannot see it, unlike a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshlib._command_line import print_note
from transport._net.fork import close_in_forked_children

LENGTH = struct.Struct("!I")
MODULE = "meshlib._launcher.controlled"


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """An order to run meshrun with ``arguments`` in ``directory``.

    ``variables`` are added to its environment. The options ``decided`` override the arguments.
    ``quiet``: another launcher of the job prints warnings and the report.
    """

    arguments: Sequence[str]
    directory: str
    variables: dict[str, str] = field(default_factory=dict[str, str])
    decided: dict[str, Any] = field(default_factory=dict[str, Any])
    quiet: bool = False


def command(python: str = sys.executable) -> list[str]:
    """Return the command that starts a launcher, which then waits for its order."""
    return [python, "-P", "-m", MODULE]  # -P: ignore modules of the current directory


def start(
    words: Sequence[str], order: LaunchOrder, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Start ``words``, which run a ``command``, perhaps through ssh, and send it its ``order``.

    ``stdout`` and ``stderr`` are descriptors, or ``subprocess.PIPE``. The process has its own
    session, so Ctrl-C must be forwarded with ``send``. Raises OSError if it cannot be started.
    """
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
    )
    body = json.dumps(asdict(order)).encode()
    assert process.stdin is not None
    close_in_forked_children(process.stdin)  # or a fork would keep the ranks alive
    with contextlib.suppress(OSError):  # it has ended; its exit code is reported later
        os.write(process.stdin.fileno(), LENGTH.pack(len(body)) + body)
    return process


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send the signal ``number`` to the launcher behind ``process``."""
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        os.write(process.stdin.fileno(), bytes([number]))


def main() -> int:
    """Run the controlled launcher; return its exit code."""
    control = _take_standard_input()
    order = _receive(control)
    if order is None:
        return 128 + signal.SIGHUP
    from meshlib._launcher.launch import launch
    from meshlib._launcher.options.arguments import parse

    try:
        os.chdir(order.directory)
    except OSError as error:
        print_note("meshrun", f"directory {order.directory}: {error.strerror}")
        return 1
    os.environ.update(order.variables)
    options = parse(order.arguments, order.decided)
    if order.quiet:
        options = replace(options, quiet=True, warnings=())
    return launch(options, control)


def _take_standard_input() -> int:
    """Move the standard input to another descriptor and return it, so that ranks cannot read it."""
    control = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _receive(control: int) -> LaunchOrder | None:
    header = _read(control, LENGTH.size)
    body = _read(control, LENGTH.unpack(header)[0]) if header else b""
    return LaunchOrder(**json.loads(body)) if body else None


def _read(descriptor: int, size: int) -> bytes:
    """Read ``size`` bytes; return no bytes if the input ends before."""
    data = b""
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            return b""
        data += piece
    return data


if __name__ == "__main__":
    sys.exit(main())
