"""Ctrl-C at a chosen moment, and threads that may hang."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Any

# Behind these Python looks for signals; behind a call only if that was not of Python code.
_LOOKS = {
    dis.opmap[name]
    for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME")
    if name in dis.opmap
}
# The NOP that a try within a try begins with is covered by neither; nor is, in Python 3.14, the one
# behind a branch.
_COVERED_BY_NONE = {dis.opmap[name] for name in ("NOP", "NOT_TAKEN") if name in dis.opmap}
SOON = 30.0


def ctrl_c() -> None:
    raise KeyboardInterrupt


class Interrupter:
    """Calls ``handler`` in this thread before the ``moment``-th bytecode of ``files``.

    ``as_signals``: of those alone before which Python looks for signals.
    """

    def __init__(
        self,
        moment: int,
        files: Collection[str | None],
        as_signals: bool = False,
        handler: Callable[[], object] = ctrl_c,
    ) -> None:
        self.left = moment
        self._handler = handler
        self._files = files
        self._as_signals = as_signals
        self._before: dict[FrameType, int] = {}
        self.where = ""
        """Before which bytecode the interrupt came."""
        self._tracer: Any = None

    def __enter__(self) -> Interrupter:
        self._tracer = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._tracer)  # such as coverage's: all that this thread runs later counts too

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and frame.f_back is not None:
            self._before.pop(frame.f_back, None)
        if frame.f_code.co_filename not in self._files:
            return self._trace
        frame.f_trace_opcodes = True
        # Python looks for signals behind calls and in loops.
        if event == "opcode":
            opcode = frame.f_code.co_code[frame.f_lasti]
            before, self._before[frame] = self._before.get(frame), opcode
            if before in _LOOKS if self._as_signals else opcode not in _COVERED_BY_NONE:
                self.left -= 1
                if self.left == 0:
                    code, name = frame.f_code, dis.opname[opcode]
                    where = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
                    self.where = f"{where}, before {name} at {frame.f_lasti}"
                    self._handler()
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


def at_every_step(
    wait: Callable[[], object],
    check: Callable[[], object],
    files: Collection[str | None],
    as_signals: bool = False,
) -> int:
    """Interrupt ``wait()`` at each of its bytecodes in ``files``, and ``check()`` each time in
    another thread; ``as_signals`` as for ``Interrupter``.

    Nothing but the interrupt may come out of it. Returns how many there were.
    """
    moment = 1
    while True:
        interrupter = Interrupter(moment, files, as_signals)
        with suppress(KeyboardInterrupt), interrupter:
            wait()
        try:
            in_thread(check).result(SOON)
        except BaseException as error:
            error.add_note(f"after interrupt {moment}: {interrupter.where}")
            raise
        if interrupter.left > 0:
            return moment
        moment += 1
