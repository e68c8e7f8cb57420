"""What meshlib's commands share: a wrong argument is one line on stderr, and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn

USAGE_ERROR = 2


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that does not repeat its usage before each error."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit."""
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (try {self.prog} --help)\n")


def print_result(prog: str, make: Callable[[], str]) -> int:
    """Print what ``make()`` returns, or its error in one line; return the exit code.

    Wrong input is ValueError, OSError or ImportError. A reader that has seen enough (``| head``)
    is no error.
    """
    try:
        text = make()
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"{prog}: {' '.join(_told(error).split())}\n")
        return USAGE_ERROR
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × is no reason to fail
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has no reader; the interpreter would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
