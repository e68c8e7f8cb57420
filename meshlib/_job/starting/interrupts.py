"""Defers Ctrl-C from ``init_process_group`` to ``destroy_process_group``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from transport._waiting.interrupts import InterruptHandler


def defer_interrupts() -> Callable[[], None]:
    """Raise Ctrl-C only in the program and in the library's waits; return a function that ends
    this.

    Does nothing outside the main thread, or if the program handles SIGINT.
    """
    handler = InterruptHandler("meshlib", "transport")
    if threading.current_thread() is not threading.main_thread():
        return handler.restore
    handler.install()
    notebook = _notebook()
    if notebook is None:
        return handler.restore

    # Jupyter's kernel sets Python's own handler before each cell.
    def on_cell(*_: object) -> None:
        handler.install()

    def end() -> None:
        notebook.events.unregister("pre_run_cell", on_cell)
        handler.restore()

    notebook.events.register("pre_run_cell", on_cell)
    return end


def _notebook() -> Any:
    """Return IPython's shell, or None outside IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
