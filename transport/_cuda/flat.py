"""A flat typed buffer in device memory, and how work on it is ordered.

Experimental, not run on a GPU (``docs/run/gpu.md``).

A call on such buffers is only put on a stream, and goes on after it returned. It begins after all
work that the array's own stream had when the call was issued (``StreamOrder.begin``). Later work
waits for its ``Completion``. A host thread waits only on request.
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
    """When the memory of an array may be touched.

    ``begin`` is the moment on the array's stream when the call was issued; ``current()`` gives the
    stream on which the calling thread will use it next. A communicator leaves the ``completion``
    of its call here.
    """

    begin: CudaEvent
    current: Callable[[], int]
    owner: object
    completion: Completion | None = None


@dataclass(slots=True, eq=False, repr=False)
class DeviceFlat:
    """``size`` elements of ``dtype`` in the memory of ``device`` from address ``pointer`` on.

    Slicing with a step of 1 gives a view of the same memory, with the same order.
    """

    pointer: int
    size: int
    dtype: np.dtype[Any]
    device: int
    driver: Driver
    order: StreamOrder

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, part: slice) -> DeviceFlat:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"a device buffer is sliced in steps of 1, got {part}")
        pointer = self.pointer + start * self.dtype.itemsize
        count = max(stop - start, 0)
        return DeviceFlat(pointer, count, self.dtype, self.device, self.driver, self.order)

    def __repr__(self) -> str:
        return f"<{self.size} elements of {self.dtype} at {self.pointer:#x} on cuda:{self.device}>"


def end_together(call: Call, flats: Sequence[DeviceFlat]) -> None:
    """Extend the completion of ``call`` over all its parts and their later work.

    Each part left a completion with its flats; the call has that of the last part.
    """
    last = call.completion
    if last is None:
        return
    for flat in flats:
        if flat.order.completion is not None:
            flat.order.completion.join_stream(last.stream)
    last.extend(flats[0].order.current, *(flat.order.owner for flat in flats))
