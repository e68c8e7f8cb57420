"""Ctrl-C at a chosen or at a random moment, and threads that may hang."""

from __future__ import annotations

import dis
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import Any

from transport._waiting.interrupts import InterruptHandler

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
    signal.raise_signal(signal.SIGINT)


@contextmanager
def deferred() -> Generator[None]:
    """Within it Ctrl-C is deferred as between init and destroy. In the main thread."""
    handler = InterruptHandler("meshlib", "transport")
    handler.install()
    assert isinstance(signal.getsignal(signal.SIGINT), InterruptHandler)
    try:
        yield
    finally:
        handler.restore()


class Interrupter:
    """Calls ``handler`` in this thread before the ``moment``-th bytecode of ``files``: SIGINT comes
    then, by default.

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
    stride: int = 1,
) -> int:
    """Have SIGINT come at each bytecode of ``wait()`` in ``files``, or at each ``stride``-th, and
    ``check()`` each time in another thread. In the main thread.

    KeyboardInterrupt comes out of each ``wait()``, and nothing else. Returns how many there were.
    """
    moment = 1
    while True:
        interrupter, raised = Interrupter(moment, files), False
        with deferred():
            try:
                with interrupter:
                    wait()
            except KeyboardInterrupt:
                raised = True
        try:
            in_thread(check).result(SOON)
            assert raised == (interrupter.left <= 0), "Ctrl-C was lost"
        except BaseException as error:
            error.add_note(f"after interrupt {moment}: {interrupter.where}")
            raise
        if interrupter.left > 0:
            return moment
        moment += stride


def at_random(wait: Callable[[], object], check: Callable[[], object], times: int) -> None:
    """Call ``wait()`` over and over until SIGINT comes, sent by another thread; then ``check()`` in
    another thread. So ``times`` times. In the main thread.
    """
    pauses: SimpleQueue[float | None] = SimpleQueue()
    chosen = random.Random(31)

    def send() -> None:
        while (pause := pauses.get()) is not None:
            time.sleep(pause)
            os.kill(os.getpid(), signal.SIGINT)

    sender = in_thread(send)
    try:
        for number in range(times):
            try:
                with deferred():
                    pauses.put(chosen.uniform(0, 3e-3))
                    while True:
                        wait()
            except KeyboardInterrupt:
                pass
            try:
                in_thread(check).result(SOON)
            except BaseException as error:
                error.add_note(f"after interrupt {number}")
                raise
    finally:
        pauses.put(None)
        sender.result(SOON)
