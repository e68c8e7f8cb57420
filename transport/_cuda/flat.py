"""Flat typed buffers in device memory, and the order of work on them.

Experimental, not run on a GPU (``docs/run/gpu.md``).

A call on these buffers only queues its work on a stream, and returns. The work starts after all
work that was on the array's own stream when the call was issued (``StreamOrder.begin``). Later work
waits for the call's ``Completion``. A host thread waits only if the user requests it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transport._calls.call import Call
from transport._cuda.completion import Completion
from transport._cuda.driver import CudaEvent, Driver


@dataclass(slots=True, eq=False)
class StreamOrder:
    """The order of a call with the other work on an array.

    The call starts after ``begin``, an event recorded on the array's stream when the call was
    issued. ``current()`` returns the stream on which the calling thread will next use the array. A
    communicator stores the ``completion`` of its call here.
    """

    begin: CudaEvent
    current: Callable[[], int]
    owner: object
    completion: Completion | None = None


@dataclass(slots=True, eq=False, repr=False)
class DeviceFlat:
    """``size`` elements of ``dtype`` in the memory of ``device``, starting at address ``pointer``.

    Slicing with a step of 1 returns a view of the same memory with the same ``order``.
    """

    pointer: int
    size: int
    dtype: np.dtype[Any]
    device: int
    driver: Driver
    order: StreamOrder

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceFlat:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"a device buffer can only be sliced with step 1, got {part}")
        pointer = self.pointer + start * self.dtype.itemsize
        count = max(stop - start, 0)
        return DeviceFlat(pointer, count, self.dtype, self.device, self.driver, self.order)

    def __repr__(self) -> str:
        return f"<{self.size} elements of {self.dtype} at {self.pointer:#x} on cuda:{self.device}>"


def end_together(call: Call, flats: Sequence[DeviceFlat]) -> None:
    """Extend the completion of ``call`` to all its parts.

    Each part has stored a completion in its flats; ``call.completion`` is that of the last part.
    """
    last = call.completion
    if last is None:
        return
    for flat in flats:
        if flat.order.completion is not None:
            flat.order.completion.join_stream(last.stream)
    last.extend(flats[0].order.current, *(flat.order.owner for flat in flats))
