"""Forwards the ranks' output: directly, by lines with a prefix, and into files.

A single rank, or the first of several on a terminal, writes to the launcher's own standard output,
so that progress bars and prompts work. All other output goes through pipes to ``OutputPump``, a
thread that writes whole lines, so that lines of different ranks never mix.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from meshlib._command_line import print_note
from meshlib._launcher.options.output import STREAMS, OutputOptions, Route

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20  # longer lines are split, to bound the memory
_PROMPT_AFTER = 0.15
"""The time after which an incomplete line is shown on a terminal, because it may be a prompt."""


@dataclass(slots=True, eq=False)
class _Source:
    reader: int
    console: int | None
    prefix: bytes
    file: BinaryIO | None
    line: bytes = b""
    since: float = 0.0


class OutputPump:
    """Copies the output of ranks. ``add`` adds a stream, ``close`` ends the pump."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector.register(self._stop_reader, selectors.EVENT_READ, None)
        self._sources: set[_Source] = set()
        self._lock = threading.Lock()
        self._added: list[_Source] = []
        self._running = False
        self._unfinished: _Source | None = None
        self._thread: threading.Thread | None = None
        self.unwritten: OSError | None = None
        """The error that made output incomplete, unless the console has no reader."""

    def add(self, reader: int, console: int | None, prefix: bytes, file: BinaryIO | None) -> None:
        """Copy bytes from descriptor ``reader`` to ``file``, and whole lines with ``prefix`` to
        descriptor ``console``. The pump closes ``reader`` and ``file``.
        """
        with self._lock:
            self._added.append(_Source(reader, console, prefix, file))
            if self._running:
                os.write(self._stop_writer, b"+")
                return
            self._running = True
        self._thread = threading.Thread(target=self._run, name="meshrun-output", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Copy the remaining output until every stream has ended, at most ``timeout`` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)  # it ends when the last writer is gone
            os.write(self._stop_writer, b".")
            self._thread.join()
        self._add_new()
        for source in list(self._sources):
            self._end(source)
        if self._unfinished is not None:
            self._write(self._unfinished, b"\n")
            self._unfinished = None
        self._selector.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    def _run(self) -> None:
        while self._add_new():
            for key, _ in self._selector.select(self._prompt_timeout()):
                source: _Source | None = key.data
                if source is None:
                    if os.read(self._stop_reader, 1) == b".":
                        return
                    continue
                try:
                    data = os.read(source.reader, _CHUNK)
                except OSError:
                    data = b""
                if data:
                    self._receive(source, data)
                else:
                    self._end(source)
            self._show_prompts()

    def _add_new(self) -> bool:
        """Add the new streams; return True if any stream is open."""
        with self._lock:
            added, self._added = self._added, []
            self._running = bool(self._sources or added)
        for source in added:
            self._sources.add(source)
            self._selector.register(source.reader, selectors.EVENT_READ, source)
        return bool(self._sources)

    def _receive(self, source: _Source, data: bytes) -> None:
        self._log(source, data)
        if source.console is None:
            return
        if not source.line:
            source.since = time.monotonic()
        complete, newline, rest = (source.line + data).rpartition(b"\n")
        source.line = rest
        if newline:
            source.since = time.monotonic()
            self._show(source, complete + newline)
        if len(rest) > _LONGEST_LINE:
            self._show(source, rest + b"\n")
            source.line = b""

    def _log(self, source: _Source, data: bytes) -> None:
        file, view = source.file, memoryview(data)
        if file is None:
            return
        try:
            while view:  # a disk that is nearly full accepts only a part
                view = view[file.write(view) :]
        except OSError as error:  # a full disk; the console output continues
            print_note("meshrun", f"{file.name} is incomplete: {error.strerror}")
            self.unwritten = error
            source.file = None
            with contextlib.suppress(OSError):
                file.close()

    def _show(self, source: _Source, text: bytes) -> None:
        """Write ``text`` to the console, after ending another source's unfinished line."""
        continued = self._unfinished is source
        if self._unfinished is not None and not continued:
            self._write(self._unfinished, b"\n")
        finished = text.endswith(b"\n")
        lines = text.split(b"\n")
        body = lines[:-1] if finished else lines
        prefix = source.prefix
        joined = (b"\n" + prefix).join(body)
        self._write(source, (b"" if continued else prefix) + joined + b"\n" * finished)
        self._unfinished = None if finished else source

    def _write(self, source: _Source, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view and source.console is not None:
                view = view[os.write(source.console, view) :]
        except OSError as error:  # the console has no reader, or its disk is full
            if not isinstance(error, BrokenPipeError):
                self.unwritten = error
            source.console = None
            if source.file is None and source in self._sources:
                source.line = b""
                self._drop(source)  # the rank's next write then fails, as without a pump

    def _prompt_timeout(self) -> float | None:
        waiting = [source.since for source in self._sources if self._may_prompt(source)]
        if not waiting:
            return None
        return max(min(waiting) + _PROMPT_AFTER - time.monotonic(), 0.0)

    def _may_prompt(self, source: _Source) -> bool:
        return bool(source.line) and source.console is not None and os.isatty(source.console)

    def _show_prompts(self) -> None:
        now = time.monotonic()
        for source in list(self._sources):
            if self._may_prompt(source) and now - source.since >= _PROMPT_AFTER:
                text, source.line = source.line, b""
                self._show(source, text)

    def _end(self, source: _Source) -> None:
        if source.line:
            text, source.line = source.line, b""
            self._show(source, text)
        self._drop(source)

    def _drop(self, source: _Source) -> None:
        if source not in self._sources:
            return
        self._sources.discard(source)
        with contextlib.suppress(KeyError):
            self._selector.unregister(source.reader)
        os.close(source.reader)
        if source.file is not None:
            try:
                source.file.close()
            except OSError as error:  # some file systems report a full disk only now
                self.unwritten = error


@dataclass(frozen=True, slots=True)
class RankStreams:
    """One rank's standard output and error; None: the launcher's own.

    ``logged``: standard error is written to a file.
    """

    stdout: int | None
    stderr: int | None
    logged: bool

    @property
    def inherited(self) -> bool:
        """True if both are the launcher's own."""
        return self.stdout is None and self.stderr is None

    def close(self) -> None:
        """Close the launcher's copies, once the rank has its own."""
        for descriptor in (self.stdout, self.stderr):
            if descriptor is not None:
                os.close(descriptor)


def connect(
    options: OutputOptions,
    pump: OutputPump,
    rank: int,
    local_rank: int,
    ranks: int,
    directory: Path,
) -> RankStreams:
    """Open the streams of one rank; files go to ``directory``. The caller closes the result."""
    out, err = (options.route(local_rank, fd, ranks, os.isatty(fd)) for fd in STREAMS)
    return RankStreams(
        _open(out, pump, rank, 1, directory / "stdout.log"),
        _open(err, pump, rank, 2, directory / "stderr.log"),
        logged=err.file,
    )


def _open(route: Route, pump: OutputPump, rank: int, console: int, path: Path) -> int | None:
    if route.inherited:
        return None
    file: BinaryIO | None = None
    if route.file:
        # The pump closes it when the rank has ended.
        file = open(path, "ab", buffering=0)  # noqa: SIM115
    if not route.console:
        if file is None:
            return os.open(os.devnull, os.O_WRONLY)
        with file:
            return os.dup(file.fileno())
    reader, writer = os.pipe()
    prefix = f"[rank {rank}] " if route.prefix else ""
    pump.add(reader, console, prefix.encode(), file)
    return writer
