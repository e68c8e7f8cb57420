"""One attempt to connect to a worker: calls wait for it, each until its own deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

from meshlib.rpc.wire.connection import Connection
from transport.deadline import Deadline


class Attempt:
    """Runs ``connect()`` in a thread of its own: it goes on when a call waits no longer."""

    def __init__(self, name: str, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._done = threading.Event()
        self._made: Connection | None = None
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._done.is_set()

    def result(self, deadline: Deadline) -> Connection | None:
        """Return the connection, None past ``deadline``; raise why it could not be made."""
        self._done.wait(deadline.remaining())
        if self._failed is not None:
            raise self._failed
        return self._made

    def join(self, seconds: float) -> None:
        """Wait for the end of its thread."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._made = self._connect()
        except BaseException as error:  # noqa: BLE001 (raised by the calls that wait for it)
            self._failed = error
        finally:
            self._done.set()
