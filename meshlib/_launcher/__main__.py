"""``meshrun``, which is also ``meshlib run``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

_STDERR = 2
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job described by ``argv`` (by default the process's arguments).

    Returns the exit code for the shell: 0, that of the first failing rank (128 + n for signal n),
    or 130 and 143 after Ctrl-C and SIGTERM. Call it from the main thread of a separate process.
    """
    _open_standard_streams()
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, _leave)
    try:
        # Imported here, so that Ctrl-C during the imports ends quietly.
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
    """Exit immediately: nothing has been started yet, because ``launch`` handles signals itself.

    An exception does not suffice: a module that is being imported may replace or suppress it.
    """
    os.write(_STDERR, b"meshrun: received SIGINT\n")
    os._exit(_INTERRUPTED)


def _open_standard_streams() -> None:
    """Open closed standard descriptors on the null device, so that no pipe gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
