"""``empty``: arrays in symmetric memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshlib._calls.spec import CallSpec
from meshlib._collectives.group_of_ranks import GroupOfRanks
from transport._calls.call import Call
from transport._calls.codes import dtype_code, dtype_name
from transport._calls.header import Kind
from transport._communicators.base import Communicator
from transport._cuda.device_state import DeviceCommunicator
from transport._cuda.driver import cuda_driver
from transport._operands.reduce_op import Flat
from transport._waiting.deadline import Timeout

_MOST_DIMS = 64


class SymmetricMemory(GroupOfRanks):
    """Symmetric memory: arrays that all members of a group on one host can access."""

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike = np.float32,
        timeout: Timeout | None = None,
        device: str = "cpu",
    ) -> Any:
        """Return an uninitialized NumPy array on which this group's collectives need no copies.

        Every member calls, with the same shape and dtype, and gets its own array. Members on one
        host can access each other's arrays, so a collective on these arrays, or on the same
        contiguous part of each, works in place. Between hosts they are ordinary arrays. A member
        may use its array freely; other members read it only in a collective that this member calls.

        With ``device="cuda"`` (the current GPU) or ``"cuda:1"`` (a certain one) the result is a
        CuPy array. With the backend ``cuda_ipc`` the members exchange the memory handles in this
        call, and collectives need not; with other backends the array is an ordinary one. The
        process keeps the memory for later arrays.

        The memory is reused when the array and its views are deleted on all members. Returns None
        on a rank outside the group. ``timeout`` (seconds or "30s") is the call's deadline. Raises
        ValueError on all members if their arguments differ; the group stays usable. An invalid
        ``shape``, ``dtype`` or ``device`` raises ValueError or TypeError.
        """
        call_queue = self._call_queue
        rank = call_queue.rank
        if rank < 0:
            return None
        dims, wanted, code, place = call_queue.checked(Kind.ALLOCATE, _check, shape, dtype, device)
        count = math.prod(dims)

        def run(communicator: Communicator, call: Call) -> Flat | list[str] | None:
            mine = _describe(code, dims, place.on_cpu)
            gathered = np.empty((len(call_queue.ranks), mine.size), mine.dtype)
            communicator.all_gather(call, list(gathered), mine)
            if not (gathered == mine).all():
                return [_show(row) for row in gathered]
            return communicator.allocate(call, count, wanted) if place.on_cpu else None

        spec = CallSpec(Kind.ALLOCATE, run, nbytes=count * wanted.itemsize)
        result = call_queue.issue(spec, timeout=timeout)
        if isinstance(result, np.ndarray):
            return result.reshape(dims)
        if result is None:
            return self._on_gpu(place, dims, wanted, timeout)
        rows = "".join(f"\n  rank {r}: {a}" for r, a in zip(call_queue.ranks, result, strict=True))
        raise ValueError(f"the members of {call_queue} request different symmetric arrays:{rows}")

    def _on_gpu(
        self,
        place: _ArrayDevice,
        dims: tuple[int, ...],
        dtype: np.dtype[Any],
        timeout: Timeout | None,
    ) -> Any:
        nbytes = math.prod(dims) * dtype.itemsize
        driver, number = place.driver, place.number

        def run(communicator: Communicator[Any], call: Call) -> Any:
            if isinstance(communicator, DeviceCommunicator):
                memory = communicator.allocate_on(call, driver, number, nbytes)
            else:  # a third-party communicator
                memory = driver.allocate(nbytes, number)
            return driver.array(memory.pointer, dims, dtype, number, memory)

        spec = CallSpec(Kind.ALLOCATE, run, nbytes=nbytes, device="cuda")
        return self._call_queue.issue(spec, timeout=timeout)


class _ArrayDevice:
    """The device of an array: the CPU, or the GPU ``number`` of ``driver``."""

    def __init__(self, device: str) -> None:
        kind, colon, text = str(device).partition(":")
        if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and text.isdecimal())):
            raise ValueError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:NUMBER'")
        self.on_cpu = kind == "cpu"
        if not self.on_cpu:
            self.driver = cuda_driver()
            count = self.driver.device_count()
            self.number = int(text) if colon else self.driver.current_device()
            if self.number >= count:
                raise ValueError(f"device is {device!r}, but this process sees {count} GPUs")


def _check(
    shape: int | Sequence[int], dtype: npt.DTypeLike, device: str
) -> tuple[tuple[int, ...], np.dtype[Any], int, _ArrayDevice]:
    """Return the shape, the dtype, its code and the device of an array."""
    wanted = np.dtype(dtype)
    return _check_shape(shape), wanted, dtype_code(wanted), _ArrayDevice(device)


def _check_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        dims = (
            (operator.index(shape),)
            if not isinstance(shape, Sequence)
            else tuple(operator.index(dim) for dim in shape)
        )
    except TypeError:
        raise TypeError(f"shape is {shape!r}; expected an integer or a sequence of them") from None
    if len(dims) > _MOST_DIMS or any(dim < 0 for dim in dims):
        raise ValueError(
            f"shape is {shape!r}; expected at most {_MOST_DIMS} dimensions, none negative"
        )
    return dims


def _describe(code: int, dims: tuple[int, ...], on_cpu: bool) -> npt.NDArray[np.int64]:
    row = np.zeros(3 + _MOST_DIMS, np.int64)
    row[:3] = code, on_cpu, len(dims)
    row[3 : 3 + len(dims)] = dims
    return row


def _show(row: npt.NDArray[np.int64]) -> str:
    dims = tuple(int(dim) for dim in row[3 : 3 + int(row[2])])
    where = "" if row[1] else ", on a GPU"
    return f"shape {dims}, dtype {dtype_name(int(row[0]))}{where}"
