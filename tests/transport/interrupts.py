"""Ctrl-C at a chosen moment, and threads that may hang."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import FrameType
from typing import Any

_NOP = dis.opmap["NOP"]


class Interrupter:
    """Raises KeyboardInterrupt in this thread before the ``moment``-th bytecode of ``files``."""

    def __init__(self, moment: int, files: Collection[str | None]) -> None:
        self.left = moment
        self._files = files

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return self._trace
        frame.f_trace_opcodes = True
        # Python looks for signals behind calls and in loops. The NOP that a try within a try
        # begins with is covered by neither.
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] != _NOP:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run it in a thread that nobody has to wait for, should it hang."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 (the test raises it)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
