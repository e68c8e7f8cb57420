"""Debug levels, and logging with the rank in each record.

All that this package says goes through the logger ``meshlib`` of the standard library, with the
rank as the record's attribute ``rank``. A debug level is that logger's level: ``OFF`` lets
warnings pass, ``INFO`` tells of groups as they are made and closed, ``DETAIL`` of every call.
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
    """The amount of logging: warnings (OFF), groups as well (INFO), each call as well (DETAIL)."""

    OFF = 0
    INFO = 1
    DETAIL = 2


_LOGGING_LEVELS = {
    DebugLevel.OFF: logging.WARNING,
    DebugLevel.INFO: logging.INFO,
    DebugLevel.DETAIL: logging.DEBUG,
}


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """The logger as one rank uses it: each record knows the rank."""

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
        """True if every call is to be logged."""
        return LOGGER.isEnabledFor(logging.DEBUG)

    def around(
        self, run: Callable[[Communicator, Call], Any], record: Record, group: object
    ) -> Callable[[Communicator, Call], Any]:
        """Return ``run`` that tells when it is done; tell of the call ``record`` now."""
        self.debug("%s on %s, %s", record.header, group, record.site)

        def logged(communicator: Communicator, call: Call) -> Any:
            result = run(communicator, call)
            took = 1e3 * (monotonic() - record.started)
            self.debug("%s on %s: done in %.3f ms", record.header, group, took)
            return result

        return logged


def set_debug_level(level: DebugLevel) -> None:
    """Set how much is logged, from now on, by all ranks in this process, to ``level``.

    Where the program has not set up logging, what is logged goes to stderr. Raises TypeError for
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
    """Return the ``DebugLevel`` that is in force: how much is logged by all ranks here."""
    if LOGGER.isEnabledFor(logging.DEBUG):
        return DebugLevel.DETAIL
    return DebugLevel.INFO if LOGGER.isEnabledFor(logging.INFO) else DebugLevel.OFF


def set_debug_level_from_env() -> None:
    """Set the debug level that the environment variable ``MESHLIB_DEBUG`` names, or ``OFF``.

    ``init_process_group`` does so where the variable is set. Raises ValueError when it is set to
    anything but ``OFF``, ``INFO`` or ``DETAIL`` (case does not matter).
    """
    text = os.environ.get(environment.DEBUG, DebugLevel.OFF.name)
    if text.upper() not in DebugLevel.__members__:
        raise ValueError(
            f"environment variable {environment.DEBUG} is {text!r}; expected one of "
            f"{', '.join(DebugLevel.__members__)}"
        )
    set_debug_level(DebugLevel[text.upper()])
