"""The common behaviour of commands: a wrong argument prints one line on stderr and returns 2."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any, NoReturn

from meshlib._did_you_mean import did_you_mean

USAGE_ERROR = 2
INTERRUPTED = 130
STDERR = 2
_UNKNOWN = "unrecognized arguments: "
_MISSING = "the following arguments are required"


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors have one line and suggest the intended option."""

    _given: Sequence[str] = ()

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See the base."""
        self._given = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        if message.startswith(_UNKNOWN):
            message += self._suggest(message.removeprefix(_UNKNOWN).split())
        elif message.startswith(_MISSING):
            # The value of a misspelt option may have been parsed as a positional argument.
            message += self._suggest(self._given)
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (try {self.prog} --help)\n")

    def _suggest(self, words: Sequence[str]) -> str:
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                return did_you_mean(name.replace("_", "-"), known)
        return ""


def print_result(prog: str, make: Callable[[], str]) -> int:
    """Print the result of ``make()``, or its error in one line; return the exit code.

    Wrong input is ValueError, OSError or ImportError.
    """
    try:
        text = make()
    except (ValueError, OSError, ImportError) as error:
        print_note(prog, " ".join(message_of(error).split()))
        return USAGE_ERROR
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack ×

    def write() -> int:
        sys.stdout.write(text)
        return 0

    return end_quietly(write)


def print_note(prog: str, text: str) -> None:
    """Print a line of the command ``prog`` on standard error, and flush it."""
    write_stderr(f"{prog}: {text}\n")


def write_stderr(text: str) -> None:
    """Write ``text`` to standard error, and flush it.

    An error is ignored: the command continues if its standard error is full or closed.
    """
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] (it was closed)
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # Otherwise Python would retry at exit, and change the exit code.
        sys.stderr = open(STDERR, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def end_quietly(run: Callable[[], int]) -> int:
    """Return the exit code of ``run()``.

    A reader may close the output early (``| head``): that is not an error. Ctrl-C returns 130
    silently.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not reader_is_gone(sys.stdout.fileno()):
            raise
        # Otherwise the interpreter would write the buffered output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED


def reader_is_gone(descriptor: int) -> bool:
    """Return whether the reader of ``descriptor`` has closed it."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def message_of(error: Exception) -> str:
    """Return the text of ``error``, without the number of a system error."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
