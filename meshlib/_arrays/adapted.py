"""The array adapter's result: a flat buffer, and a function that returns the caller's array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from transport._operands.reduce_op import Flat

Entry_co = TypeVar("Entry_co", covariant=True)


@dataclass(slots=True)
class AdaptedArray:
    """A caller's array, adapted for one collective.

    ``flat`` is the buffer that the communicator works on: the array's own memory if possible. If
    ``device`` is not ``"cpu"``, ``flat`` is a ``DeviceFlat``, with the same attributes and slices.
    After the call, ``finish()`` copies the contents of ``flat`` back unless memory is shared. It
    returns the caller's result: the same array if it is writable, else a new one. If
    ``writes_back``, ``finish`` changes the caller's memory. If ``returned_only``, the caller's
    array is read-only, and the result is a new one.
    """

    flat: Flat
    shape: tuple[int, ...]
    device: str
    finish: Callable[[], Any]
    writes_back: bool = False
    returned_only: bool = False

    def put_back(self, put: Callable[[Any], object]) -> None:
        """Make ``finish`` also call ``put`` with the result if that is a new array."""
        if not self.returned_only:
            return
        finish = self.finish

        def finish_and_put() -> Any:
            result = finish()
            put(result)
            return result

        self.finish = finish_and_put
        self.returned_only = False


class ListOf(Protocol[Entry_co]):
    """A list of arrays, or an array whose first axis enumerates them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Entry_co: ...


def read_only(array: Any, name: str) -> TypeError:
    """Return the error for a read-only array that a call would have to write to."""
    return TypeError(
        f"{name} is a read-only array (shape {array.shape}, dtype {array.dtype}); "
        "expected a writable one to put the result into"
    )


class ArrayLibrary(Protocol):
    """The adapter's view of one array library."""

    def recognises(self, array: Any) -> bool:
        """Return whether ``array`` is this library's."""
        ...

    def source(self, array: Any, name: str) -> AdaptedArray:
        """Adapt an array that is only read."""
        ...

    def target(self, array: Any, name: str, *, keep: bool) -> AdaptedArray:
        """Adapt an array that is written; with ``keep``, the call also reads its contents."""
        ...
