"""What the array adapter gives: a flat buffer, and the way back to the caller's array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from transport.operands.reduce_op import Flat


@dataclass(slots=True)
class Adapted:
    """An array on its way through a collective.

    ``flat`` is the buffer that the communicator works on: the array's own memory wherever that is
    possible (a ``DeviceFlat``, which has its attributes and slices alike, where ``device`` is not
    ``"cpu"``: the communicator of that device takes it). ``finish()`` brings the contents of
    ``flat`` back (a no-op when memory is shared) and returns what the caller gets: the same array
    if it is writable, else a new one. ``writes_back``: ``finish`` changes the caller's memory.
    """

    flat: Flat
    shape: tuple[int, ...]
    device: str
    finish: Callable[[], Any]
    writes_back: bool = False


class ArrayLibrary(Protocol):
    """What the adapter has to know about one array library."""

    def recognises(self, array: Any) -> bool:
        """Whether ``array`` is this library's."""
        ...

    def source(self, array: Any, name: str) -> Adapted:
        """Adapt an array that is only read."""
        ...

    def target(self, array: Any, name: str, *, keep: bool) -> Adapted:
        """Adapt an array that is written; ``keep`` when its present contents matter too."""
        ...
