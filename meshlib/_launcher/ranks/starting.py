"""Starting the ranks' processes, in one of two ways. ``placement`` has their variables.

A rank that is started by ``exec`` imports NumPy and this package anew, a quarter of a second of one
core each. With ``fork``, one process imports them, while it has no other thread, and forks: ranks
share the loaded modules and their memory. The launcher adopts the ranks: it is their subreaper, and
a process in between ends at once. So it waits for them and signals them like its own children, and
they notice its end. The fork server is the file ``bootstrap``; each child goes on in it with an
environment, output and session of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from meshlib._launcher.ranks import bootstrap
from meshlib._launcher.ranks.forking import LENGTH, receive
from transport import _environment as environment

if TYPE_CHECKING:
    from meshlib._launcher.options.launch import LaunchOptions, RankProgram
    from meshlib._launcher.ranks.output import RankStreams

_ANSWER_SECONDS = 20.0
"""The time that imports may hang; then ranks start anyway, and show the place."""


class ForkedRank:
    """A rank's process, with the methods of ``subprocess.Popen`` that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Collect the process if it has ended; return its exit code, -n for signal n."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process has ended and return its exit code."""
        return self._collect(0)

    def _collect(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # collected by somebody else, who did not keep its status
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The launcher's side: a process that forks ranks when asked to.

    It starts at once, and imports while the launcher gets ready. The command ``command(flags)``
    starts bootstrap with these flags; ``variables`` are the known part of a rank's environment.
    """

    def __init__(self, command: Callable[[str], list[str]], variables: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                command(f"{bootstrap.SERVE}{theirs.fileno()}"),
                env=dict(variables),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def fork(
        self, flags: str, variables: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> ForkedRank | None:
        """Start a rank with the ``variables`` and descriptors (None: the launcher's own).

        ``flags`` are bootstrap's. Returns None if ranks cannot be forked: they are to be started
        otherwise.
        """
        import json  # not before the server has begun

        order = {
            "flags": flags,
            "variables": dict(variables),
            "streams": [number for number, own in ((1, stdout), (2, stderr)) if own is not None],
        }
        descriptors = [own for own in (stdout, stderr) if own is not None]
        body = json.dumps(order).encode()
        try:
            socket.send_fds(self._socket, [LENGTH.pack(len(body))], descriptors)
            self._socket.sendall(body)
            answer = receive(self._socket, LENGTH.size)
        except OSError:  # it has ended, or hangs
            answer = b""
        pid = LENGTH.unpack(answer)[0] if answer else 0
        if not pid:
            self.close()  # nothing may come of it later
        return ForkedRank(pid) if pid else None

    def close(self) -> None:
        """End the server; the ranks go on. Idempotent."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def start_server(options: LaunchOptions, run_id: str) -> ForkServer | None:
    """Start the process that this node's ranks are forked from, if they are forked."""
    if options.start != "fork" or options.program.kind == "program":
        return None
    from meshlib._launcher.ranks.placement import limit_threads

    variables = {**os.environ, environment.RUN_ID: run_id}
    limit_threads(variables, options.ranks)
    try:
        with _interrupt_later():
            return ForkServer(partial(_command_line, options.program), variables)
    except OSError:  # out of processes or descriptors: each rank will tell better
        return None


def start(
    program: RankProgram, ends: RankStreams, variables: Mapping[str, str], server: ForkServer | None
) -> subprocess.Popen[bytes] | ForkedRank:
    """Start a rank that runs ``program``, with the output ``ends`` and all of its ``variables``;
    from ``server``, if there is one and it can.
    """
    flags = "-" if ends.inherited else "-l"
    if not ends.logged:  # a log keeps each rank's traceback; the console gets only the first
        flags += "q"
    if server is not None:
        forked = server.fork(flags, variables, ends.stdout, ends.stderr)
        if forked is not None:
            return forked
    with _interrupt_later():
        return subprocess.Popen(
            _command_line(program, flags),
            env=variables,
            stdout=ends.stdout,
            stderr=ends.stderr,
            start_new_session=True,
        )


def _command_line(program: RankProgram, flags: str) -> list[str]:
    """Return the command that starts ``program`` in a rank: this Python with ``bootstrap``."""
    python = [sys.executable]
    if program.kind == "program":
        python += ["-I", "-S"]
    return [
        *python,
        bootstrap.__file__,
        str(os.getpid()),
        flags,
        program.kind,
        program.target,
        *program.arguments,
    ]


@contextlib.contextmanager
def _interrupt_later() -> Generator[None]:
    """Have a process that is started in the block find SIGINT blocked: ``bootstrap`` lets it in.

    Python would print where in its own beginning Ctrl-C came, and in each rank.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
