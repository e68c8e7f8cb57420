"""Starting a library's ranks, each with a pipe of its own in each direction.

Ranks that an MPI launcher starts have its input and output, which is why their pipes have names:
a shell between the two opens them. A rank that waits in a read of its own pipe uses no processor,
as one that waits in a barrier of MPI would.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from transport.deadline import Deadline

# $0 is the folder of the pipes; the rest is the program.
_SHELL = 'exec "$@" --rank "$RANK" <"$0/requests.$RANK" >"$0/answers.$RANK"'
_TERMINATE_SECONDS = 5.0


class RankProcesses:
    """The processes of ``size`` ranks that run ``program`` with ``--rank`` appended.

    ``launcher`` is the command that starts them all, which leaves a rank's number in the variable
    ``rank_variable``; empty: each is started by itself. What they print goes to ``folder``.
    """

    def __init__(
        self,
        program: Sequence[str],
        size: int,
        folder: Path,
        environment: Mapping[str, str],
        launcher: Sequence[str] = (),
        rank_variable: str = "",
    ) -> None:
        self.requests: list[int] = []
        self.answers: list[int] = []
        self.log: Path = folder / "errors.txt"
        self.pids: list[int] = []
        """The ranks' own, where they are known: the launcher's are no children."""

        self._launched = bool(launcher)
        self.started: list[subprocess.Popen[bytes]] = []
        for rank in range(size):
            requests, answers = folder / f"requests.{rank}", folder / f"answers.{rank}"
            os.mkfifo(requests)
            os.mkfifo(answers)
            # Read and write: opening does not wait for the rank, and only this end keeps it open.
            self.requests.append(os.open(requests, os.O_RDWR | os.O_CLOEXEC))
            self.answers.append(os.open(answers, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        shell = ["/bin/sh", "-c", f"RANK=${rank_variable or 'RANK'}; {_SHELL}", str(folder)]
        if launcher:
            # The launcher lies beside the interpreter whose MPI it belongs to.
            beside = str(Path(program[0]).parent)
            path = beside + os.pathsep + environment.get("PATH", os.defpath)
            found = shutil.which(launcher[0], path=path) or launcher[0]
            command = [found, *launcher[1:], "-n", str(size), *shell, *program]
            self._start(command, {**environment, "PATH": path})
        else:
            for rank in range(size):
                self._start([*shell, *program], {**environment, "RANK": str(rank)})

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        with self.log.open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )

    def has_ended(self) -> bool:
        """Return whether one of the processes that were started is gone."""
        return any(process.poll() is not None for process in self.started)

    def hang_up(self) -> None:
        """End the ranks' input, upon which they leave."""
        for fd in (*self.requests, *self.answers):
            os.close(fd)
        self.requests, self.answers = [], []

    def end(self, seconds: float) -> None:
        """Wait ``seconds`` at most for all to leave, then kill them."""
        deadline = Deadline.after(seconds)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(deadline.remaining())
        self.kill()

    def kill(self) -> None:
        """Leave no process behind, not even where ranks are a launcher's children."""
        alive = [process for process in self.started if process.poll() is None]
        if not alive:
            return
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        deadline = Deadline.after(_TERMINATE_SECONDS)
        for process in alive:
            if self._launched:  # a launcher takes its helpers and its files with it, if it may
                process.terminate()
            else:
                process.kill()
        for process in alive:
            try:
                process.wait(deadline.remaining())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
