"""Debug levels, and logging with the rank in each record.

This package logs to the standard library's logger ``meshlib``, with the rank as the record's
attribute ``rank``. A debug level sets the logger's level: ``OFF`` logs only warnings, ``INFO`` also
the creation and closing of groups, ``DETAIL`` also every call.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, MutableMapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from transport import _environment as environment

if TYPE_CHECKING:
    from meshlib._recording.recorder import Record
    from transport._calls.call import Call
    from transport._communicators.base import Communicator

LOGGER = logging.getLogger("meshlib")
FORMAT = "%(asctime)s [rank %(rank)s] %(levelname)s: %(message)s"


class DebugLevel(enum.IntEnum):
    """The amount of logging: warnings (OFF), also groups (INFO), also each call (DETAIL)."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_LOGGING_LEVELS = {
    DebugLevel.OFF: logging.WARNING,
    DebugLevel.INFO: logging.INFO,
    DebugLevel.DETAIL: logging.DEBUG,
}


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """The logger of one rank, which adds the rank to each record."""

    def __init__(self, rank: int) -> None:
        super().__init__(LOGGER, {"rank": rank})

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the rank to the caller's ``extra``."""
        kwargs["extra"] = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        return msg, kwargs

    @property
    def detailed(self) -> bool:
        """True if every call is logged."""
        return LOGGER.isEnabledFor(logging.DEBUG)

    def around(
        self, run: Callable[[Communicator, Call], Any], record: Record, group: object
    ) -> Callable[[Communicator, Call], Any]:
        """Log the call ``record``; return a ``run`` that logs its end."""
        self.debug("%s on %s, %s", record.header, group, record.site)

        def logged(communicator: Communicator, call: Call) -> Any:
            result = run(communicator, call)
            took = 1e3 * (monotonic() - record.started)
            self.debug("%s on %s: done in %.3f ms", record.header, group, took)
            return result

        return logged


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of all ranks in this process to ``level``.

    If the program has not configured logging, records are written to stderr. Raises TypeError for
    anything but a ``DebugLevel``.
    """
    if not isinstance(level, DebugLevel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"level must be a DebugLevel such as DebugLevel.INFO, got {level!r}")
    LOGGER.setLevel(_LOGGING_LEVELS[level])
    if level is not DebugLevel.OFF and not LOGGER.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT, defaults={"rank": "?"}))
        LOGGER.addHandler(handler)


def get_debug_level() -> DebugLevel:
    """Return the current ``DebugLevel`` of all ranks in this process."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        return DebugLevel.DETAIL
    return DebugLevel.INFO if LOGGER.isEnabledFor(logging.INFO) else DebugLevel.OFF


def set_debug_level_from_env() -> None:
    """Set the debug level from the environment variable ``MESHLIB_DEBUG``; ``OFF`` if unset.

    ``init_process_group`` calls it if the variable is set. Raises ValueError for values other than
    ``OFF``, ``INFO`` and ``DETAIL`` (case does not matter).
    """
    text = os.environ.get(environment.DEBUG, DebugLevel.OFF.name)
    if text.upper() not in DebugLevel.__members__:
        raise ValueError(
            f"environment variable {environment.DEBUG} is {text!r}; expected one of "
            f"{', '.join(DebugLevel.__members__)}"
        )
    set_debug_level(DebugLevel[text.upper()])
