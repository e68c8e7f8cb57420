"""``meshlib top``: a running job in the terminal."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType

from meshlib._command_line import OneLineParser, end_quietly, print_result
from meshlib._monitor.jobs import find
from meshlib._monitor.text import lines, stack_lines
from meshlib._monitor.view import JobView, State
from meshlib._monitor.watch import SECONDS, STACK_SECONDS, JobWatch
from transport._errors import DistError, DistNetworkError

_FIRST_SECONDS = 5.0
_ENTER = "\x1b[?1049h\x1b[?25l"
"""Switches the terminal to its alternate screen, without a cursor."""
_LEAVE = "\x1b[?25h\x1b[?1049l"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (2 when there is no such job)."""
    parser = OneLineParser(
        prog="meshlib top",
        description="Show a running job: its ranks on the mesh, waiting ranks, step times, bytes"
        " per second by mesh dim, and the calls under way. q ends this command, not the job.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="a job of yours on this machine: meshrun's process id, or the beginning of its"
        " program or run; or HOST:PORT of a job's store (with the ranks' secret in the"
        " environment); default: the only running job",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the state once (default without a terminal)"
    )
    parser.add_argument(
        "--stacks", type=int, metavar="RANK", help="print the stacks of a rank's threads instead"
    )
    options = parser.parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show ↓
    if options.stacks is not None or options.once or not sys.stdout.isatty():
        return print_result(parser.prog, lambda: _once(options.job, options.stacks))
    return end_quietly(lambda: _live(parser, options.job))


def _watch(name: str | None) -> JobWatch:
    job = find(name)
    try:
        store = job.connect()
    except DistNetworkError as error:
        raise ValueError(f"the store of job {job.name} cannot be reached: {error}") from error
    return JobWatch(store, JobView(os.path.basename(job.program) or job.name, job.ranks))


def _once(name: str | None, rank: int | None) -> str:
    """Return the job's state, or the stacks of ``rank``, as text; raise ValueError on failure."""
    watch = _watch(name)
    try:
        _await_samples(watch)
        if rank is not None:
            return "".join(f"{line}\n" for line in stack_lines(watch.stacks(rank, STACK_SECONDS)))
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 160
        return watch.read(lambda view: lines(view, time.time(), width, 10_000, paint=False))
    except DistError as error:
        raise ValueError(str(error)) from error
    finally:
        watch.close()


def _await_samples(watch: JobWatch) -> None:
    """Wait until all ranks have posted a new sample, or some seconds have passed.

    The first samples in the store may be old.
    """
    until = time.monotonic() + _FIRST_SECONDS
    while True:
        watch.look()
        if time.monotonic() >= until or watch.read(_is_complete):
            return
        time.sleep(SECONDS / 4)


def _is_complete(view: JobView) -> bool:
    now = time.time()
    there = view.there(now)
    absent = any(one.state(now) == State.ABSENT for one in view.ordered())
    return bool(there) and not absent and all(one.taken > 1 for one in there)


def _live(parser: OneLineParser, name: str | None) -> int:
    try:
        watch = _watch(name)
    except ValueError as error:
        parser.error(str(error))
    # Restore the terminal, however the command ends.
    signal.signal(signal.SIGTERM, _end)
    with _page() as pressed:
        try:
            watch.start()
            while not watch.read(lambda view: view.over):
                size = shutil.get_terminal_size()
                text = watch.read(
                    lambda view, size=size: lines(
                        view, time.time(), size.columns, size.lines - 1, paint=True
                    )
                )
                sys.stdout.write("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J")
                sys.stdout.flush()
                if pressed(SECONDS / 2) in ("q", "Q", "\x1b"):
                    return 0
        finally:
            watch.close()
    over = watch.read(lambda view: view.over)
    sys.stdout.write(f"{over}\n")
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)


@contextmanager
def _page() -> Generator[Callable[[float], str]]:
    """Use the terminal's alternate screen, and read single keys, while the block runs.

    Yields a function ``pressed(seconds)`` that returns the next key, or "" after that time.
    """
    import termios
    import tty

    descriptor = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(descriptor) if descriptor is not None else None

    def pressed(seconds: float) -> str:
        if descriptor is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return os.read(descriptor, 1).decode("latin-1") if ready else ""

    sys.stdout.write(_ENTER)
    try:
        if descriptor is not None:
            tty.setcbreak(descriptor)
        yield pressed
    finally:
        if descriptor is not None and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
