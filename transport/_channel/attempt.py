"""One attempt to connect, which outlasts the callers that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transport._channel.connection import Connection
from transport._deadline import Deadline
from transport._interrupts import sliced


class ConnectAttempt:
    """Runs ``connect()`` in a thread of its own; callers wait for it until their own deadlines."""

    def __init__(self, name: str, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._done = threading.Event()
        self._connection: Connection | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._done.is_set()

    def result(self, deadline: Deadline) -> Connection | None:
        """Return the connection, None past ``deadline``; raise what the attempt failed with."""
        sliced(self._done.wait, deadline.remaining())
        if self._error is not None:
            raise self._error
        return self._connection

    def join(self, seconds: float) -> None:
        """Wait for the end of its thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._connection = self._connect()
        except Exception as error:  # noqa: BLE001 (raised in the waiting callers)
            self._error = error
        finally:
            self._done.set()
