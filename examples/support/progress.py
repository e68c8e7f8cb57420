"""Progress of a training run: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars


class Progress:
    """The display of the progress of tasks; ``shown`` is True on one rank.

    If the output is not a terminal, it prints a line every ``every`` seconds, and at a task's end.
    """

    def __init__(self, shown: bool, every: float = 3.0) -> None:
        self._shown = shown
        self._every = every
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}")
        self._bars = Bars(TextColumn("{task.description}"), *columns, TimeElapsedColumn())
        self._on_terminal = Console().is_terminal

    def __enter__(self) -> Progress:
        if self._shown and self._on_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars.live.is_started:
            self._bars.stop()

    def task(self, title: str, total: int, done: int = 0) -> Callable[[str], None]:
        """Begin a task of ``total`` steps; return a function to call with a text after each."""
        if not self._shown:
            return lambda text: None
        if self._on_terminal:
            number = self._bars.add_task(title, total=total, completed=done, text="")
            return lambda text: self._bars.update(number, advance=1, text=text)
        begun = printed = time.monotonic()

        def advance(text: str) -> None:
            nonlocal done, printed
            done += 1
            now = time.monotonic()
            if done == total or now - printed >= self._every:
                printed = now
                print(f"{title}: {done} of {total}, {text}, {now - begun:.0f} s", flush=True)

        return advance
