"""The Python stacks of threads, formatted for reports."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from types import FrameType

from meshlib._recording.recorder import OWN_FOLDERS, is_between

_LIBRARY = (os.path.dirname(os.__file__), "<frozen")
_CALLS = OWN_FOLDERS[:2]  # meshlib and transport; parallel computes as well
# Guards the garbage collector, which ranks that are threads share.
_uncollected = threading.Lock()


def user_stack(thread_id: int | None) -> list[str]:
    """Return the Python stack of a thread, outermost frame first, as lines to print.

    Leaves out the launcher's frames and, inside a call of this project, the project's frames.
    """
    frames = frames_of(thread_id) if thread_id else []
    owners = [_owner(frame) for frame, _ in frames]
    first = next((i for i, owner in enumerate(owners) if owner == "user"), 0)
    last = max((i for i, owner in enumerate(owners) if owner == "user"), default=len(frames) - 1)
    if "own" not in owners[last:]:
        last = len(frames) - 1
    return _lines(frames[first : last + 1])


def all_stacks() -> dict[str, list[str]]:
    """Return the full Python stack of each of this process's threads, by thread name.

    A stack is a list of lines to print, outermost frame first.
    """
    found: dict[str, list[str]] = {}
    for thread in threading.enumerate():
        name = thread.name if thread.name not in found else f"{thread.name} ({thread.ident})"
        found[name] = _lines(frames_of(thread.ident) if thread.ident else [])
    return found


def _lines(frames: list[tuple[FrameType, int]]) -> list[str]:
    entries = traceback.StackSummary.extract(iter(frames)).format()
    return [line for entry in entries for line in entry.rstrip().splitlines()]


def is_in_call(thread_id: int) -> bool:
    """Return whether a thread is inside a call of meshlib, or waits for the end of one."""
    for frame, _ in reversed(frames_of(thread_id)):
        name = frame.f_code.co_filename
        if name.startswith(_CALLS):
            return True
        if not name.startswith(_LIBRARY):
            return False
    return False


def frames_of(thread_id: int) -> list[tuple[FrameType, int]]:
    """Return the frames of a running thread and their lines, outermost first."""
    with _uncollected:
        # CPython 3.11 makes a frame's object on demand, which may start a collection. A finalizer
        # may then let the thread run and leave that frame, whose memory the new object would still
        # refer to.
        collects = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]
            return list(traceback.walk_stack(frame))[::-1] if frame else []
        finally:
            if collects:
                gc.enable()


def _owner(frame: FrameType) -> str:
    """Return the owner of a frame's code: ``own``, ``between``, ``stdlib`` or ``user``."""
    name = frame.f_code.co_filename
    if name.startswith(OWN_FOLDERS):
        return "own"
    if is_between(name):
        return "between"
    library = name.startswith(_LIBRARY) and "site-packages" not in name
    return "stdlib" if library else "user"
