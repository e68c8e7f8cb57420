"""A progress bar on the terminal, with the current measurement and the time left."""

from __future__ import annotations

import sys
import time

_CELLS = 24


class ProgressBar:
    """A progress bar that disappears at the end of its block; only on a terminal's stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def __call__(self, what: str, share: float) -> None:
        """Show the current measurement ``what``, and the finished ``share`` (0 to 1)."""
        if not self._shown:
            return
        full = int(share * _CELLS)
        left = ""
        if share > 0:
            seconds = (time.monotonic() - self._began) * (1 - share) / share
            left = f", {int(seconds) // 60}:{int(seconds) % 60:02} left"
        bar = "█" * full + "░" * (_CELLS - full)
        self._write(f"{bar} {share:4.0%}{left}  {what}")

    def clear(self) -> None:
        """Remove the bar, so that other text can be printed."""
        if self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
