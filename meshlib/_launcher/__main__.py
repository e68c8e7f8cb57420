"""``meshrun``, which is also ``meshlib run``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_STDERR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job that ``argv`` (default: the process's arguments) describes.

    Returns the exit code for the shell: 0, the first failing rank's (128 + n for signal n), or
    130 and 143 after Ctrl-C and SIGTERM. Call it from the main thread of a process of its own.
    """
    _open_what_is_closed()
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, _leave)
    try:
        # Imported here, because a user may think better of it while they load.
        from meshlib._launcher.options.arguments import parse

        options = parse(argv)
        if options.hosts is not None:
            from meshlib._launcher.nodes.over_ssh import launch_on_hosts

            return launch_on_hosts(options)
        from meshlib._launcher.launch import launch

        return launch(options)
    finally:
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    """End at once: nothing has been started, since the launch itself takes signals.

    An exception is not enough: a module under import may replace or drop it.
    """
    os.write(_STDERR, b"meshrun: received SIGINT\n")
    os._exit(_INTERRUPTED)


def _open_what_is_closed() -> None:
    """Have 0, 1 and 2 lead nowhere where they are closed: a pipe of a rank must not become one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
