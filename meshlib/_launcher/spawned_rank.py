"""A rank that ``spawn`` started: its main function, and the errors that report its failure."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshlib._launcher.ranks.bootstrap import describe_error, die_with_parent
from transport._errors import DistError
from transport._waiting.interrupts import run_outside

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class ProcessException(DistError):
    """A rank that ``spawn`` started has failed.

    ``error_index`` is the rank, ``error_pid`` the id of its process.
    """

    def __init__(self, message: str, error_index: int, pid: int) -> None:
        super().__init__(message)
        self.error_index = error_index
        self.error_pid = pid


class ProcessRaisedException(ProcessException):
    """The function raised; the message holds the rank's traceback."""


class ProcessExitedException(ProcessException):
    """The process ended by itself or was killed.

    ``exit_code`` is the exit code, or minus the signal's number. ``signal_name`` is None if the
    process ended by itself.
    """

    def __init__(
        self, message: str, error_index: int, pid: int, exit_code: int, signal_name: str | None
    ) -> None:
        super().__init__(message, error_index, pid)
        self.exit_code = exit_code
        self.signal_name = signal_name


def run_rank(
    fn: Callable[..., Any],
    rank: int,
    args: tuple[Any, ...],
    variables: dict[str, str],
    errors: Connection,
    parent: int | None,
) -> None:
    """Run ``fn`` as a rank in this process, which is killed when the process ``parent`` ends.

    If ``parent`` is None, a thread watches multiprocessing's parent, because the kernel cannot.
    """
    if parent is not None:
        die_with_parent(parent)
    else:
        threading.Thread(target=_end_with_parent, name="meshlib-parent", daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    try:
        run_outside(fn, rank, *args)
    except KeyboardInterrupt:  # the parent was interrupted as well, and reports it
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:  # noqa: BLE001 (the parent raises it, of any type)
        errors.send(describe_error(error, rank, __file__))
        raise SystemExit(1) from None
    finally:
        errors.close()


def _end_with_parent() -> None:
    import multiprocessing

    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
