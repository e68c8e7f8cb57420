"""pdb on one rank of a job."""

from __future__ import annotations

import os
import pdb
import sys
from typing import IO, Any


class RankDebugger(pdb.Pdb):
    """pdb on the terminal from which the job was started, if there is one.

    A rank's output may be a pipe to the launcher, which forwards whole lines and so no prompt.
    """

    def __init__(self) -> None:
        self._opened: list[IO[Any]] = []
        streams: dict[str, Any] = {}
        if sys.stdin is sys.__stdin__ and os.isatty(0) and not os.isatty(1):
            # NOCTTY: a rank is a session leader, and would otherwise take over the terminal.
            terminal = os.open(os.ttyname(0), os.O_WRONLY | os.O_NOCTTY)
            self._opened = [os.fdopen(0, closefd=False), os.fdopen(terminal, "w")]
            streams = {"stdin": self._opened[0], "stdout": self._opened[1]}
        elif sys.stdin is not sys.__stdin__:
            streams = {"stdin": sys.stdin, "stdout": sys.stdout}
        super().__init__(nosigint=True, **streams)

    def close(self) -> None:
        """Release the terminal."""
        for stream in self._opened:
            stream.close()
