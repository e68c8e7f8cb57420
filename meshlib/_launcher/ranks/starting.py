"""Starts the ranks' processes, by ``exec`` or ``fork``. ``placement`` has their variables.

A rank that is started by ``exec`` imports NumPy and this package again. With ``fork``, one process
imports them while it has no other thread, and forks: ranks share the loaded modules and their
memory. An intermediate process ends immediately, so the launcher, as subreaper, adopts the ranks.
It can then wait for them and signal them like its own children, and they notice its end. The fork
server runs ``bootstrap``; each child continues there with its own environment, output and session.
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
"""The time limit for hanging imports; then ranks start without the server, and show the place."""


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
            except ChildProcessError:  # other code collected it, and its status is unknown
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The launcher's side of the process that forks ranks.

    It starts immediately, and imports while the launcher prepares the job. The command
    ``command(flags)`` starts bootstrap with these flags; ``variables`` is the known part of a
    rank's environment.
    """

    def __init__(self, command: Callable[[str], list[str]], variables: Mapping[str, str]) -> None:
        self._socket, remote = socket.socketpair()
        self._socket.settimeout(_ANSWER_SECONDS)
        with remote:
            self._process = subprocess.Popen(
                command(f"{bootstrap.SERVE}{remote.fileno()}"),
                env=dict(variables),
                pass_fds=[remote.fileno()],
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

        ``flags`` are bootstrap's. Returns None if ranks cannot be forked and must be started by
        exec.
        """
        import json  # imported after the start of the server

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
            self.close()  # it must not start the rank later
        return ForkedRank(pid) if pid else None

    def close(self) -> None:
        """End the server; the ranks continue. Idempotent."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def start_server(options: LaunchOptions, run_id: str) -> ForkServer | None:
    """Start the fork server of this node's ranks, if they are forked."""
    if options.start != "fork" or options.program.kind == "program":
        return None
    from meshlib._launcher.ranks.placement import limit_threads

    variables = {**os.environ, environment.RUN_ID: run_id}
    limit_threads(variables, options.ranks)
    try:
        with _interrupts_blocked():
            return ForkServer(partial(_command_line, options.program), variables)
    except OSError:  # out of processes or descriptors: each rank reports it
        return None


def start(
    program: RankProgram, ends: RankStreams, variables: Mapping[str, str], server: ForkServer | None
) -> subprocess.Popen[bytes] | ForkedRank:
    """Start a rank of ``program``, with the output ``ends`` and the environment ``variables``.

    It is forked from ``server``, if there is one and it can fork.
    """
    flags = "-" if ends.inherited else "-l"
    if not ends.logged:  # logs have all tracebacks, the console only the first
        flags += "q"
    if server is not None:
        forked = server.fork(flags, variables, ends.stdout, ends.stderr)
        if forked is not None:
            return forked
    with _interrupts_blocked():
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
def _interrupts_blocked() -> Generator[None]:
    """Start processes in the block with SIGINT blocked; ``bootstrap`` unblocks it.

    Otherwise Ctrl-C during Python's start would print a traceback in each rank.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
