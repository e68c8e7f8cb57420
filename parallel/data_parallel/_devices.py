"""The GPUs of one process: copies between them, work on all at once, nested arrays among them.

Experimental, not run on a GPU (``docs/gpu.md``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import add
from typing import Any, TypeVar

import numpy as np

from meshlib import DistBackendError
from meshlib.extend import Driver, driver_of
from parallel._arrays import Array, is_array, namespace
from parallel._nested import all_leaves, map_leaves

_T = TypeVar("_T")

_INSTEAD = (
    "DataParallel runs a module of CuPy arrays on the GPUs of one process. For devices of JAX, its"
    " CPU devices among them, there is parallel.jax.DataParallel; for several processes, with or"
    " without GPUs, DistributedDataParallel"
)


class Devices:
    """One process' GPUs by number, each used through the calling thread's current stream on it.

    ``driver`` is what stands below: CUDA's, or the tests' own, whose devices are host memory.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @classmethod
    def of_arrays(cls, arrays: Sequence[Array]) -> Devices:
        """Return the devices for ``arrays``.

        Raises DistBackendError that says what is missing, and what there is without GPUs.
        """
        try:
            devices = cls(driver_of(arrays[0] if arrays else None))
            if devices.count():
                return devices
        except DistBackendError as error:
            raise DistBackendError(f"{error}. {_INSTEAD}") from error
        raise DistBackendError(f"no GPU is visible to this process. {_INSTEAD}")

    def count(self) -> int:
        """Return how many there are."""
        return self._driver.device_count()

    def device_of(self, array: Array) -> int | None:
        """Return the number of the device that ``array`` is on, None for the host."""
        # NumPy's arrays have a device as well: a string.
        return getattr(getattr(array, "device", None), "id", None)

    @contextmanager
    def on(self, device: int, stream: int | None = None) -> Generator[None]:
        """Make ``device`` current in the calling thread, and ``stream`` on it if given."""
        with self._driver.on(device):
            if stream is None or stream == self._driver.current_stream(device):
                yield
            else:
                with self._driver.on(device, stream):
                    yield

    def put(self, array: Array, device: int) -> Array:
        """Return ``array`` on ``device``: itself if it is there, else a copy."""
        return self.put_all([array], device)[0]

    def put_all(self, arrays: Sequence[Array], device: int) -> list[Array]:
        """Return ``arrays`` on ``device``: those that are there as they are, of others copies.

        Copies are put on the current stream of ``device``. They come after all that the current
        streams of the devices they are from have now, and what is put there later comes after them.
        """
        results = list(arrays)
        sources: dict[int, list[int]] = {}
        for place, array in enumerate(arrays):
            source = self.device_of(array)
            if source is None:
                with self.on(device):
                    results[place] = import_module("cupy").asarray(array)
            elif source != device:
                sources.setdefault(source, []).append(place)
        for source, places in sources.items():
            with self.on(source):
                whole = [namespace(arrays[i]).ascontiguousarray(arrays[i]) for i in places]
            self._wait(device, source)
            with self.on(device):
                for place, array in zip(places, whole, strict=True):
                    results[place] = self._copied(array, device)
            # Until then the memory of what is copied must not be used for anything else.
            self._wait(source, device)
        return results

    def _copied(self, array: Array, device: int) -> Array:
        result = namespace(array).empty(array.shape, array.dtype)
        if array.nbytes:
            into, pointer = (a.__cuda_array_interface__["data"][0] for a in (result, array))
            self._driver.copy(into, pointer, array.nbytes, self._driver.current_stream(device))
        return result

    def _wait(self, device: int, other: int) -> None:
        """Make the current stream of ``device`` wait for what that of ``other`` has now."""
        event = self._driver.create_event(other)
        event.record(self._driver.current_stream(other))
        self._driver.wait_event(self._driver.current_stream(device), event, device)

    def run(self, devices: Sequence[int], tasks: Sequence[Callable[[], _T]]) -> list[_T]:
        """Return the results of ``tasks``, each run on its own one of ``devices``, all at once.

        The first one runs in the calling thread, each other one in a thread that has ended when
        this returns or raises. All use the calling thread's current streams, and copies of its
        context variables. An exception of the first task that raised one is raised, with a note
        that names the device; exceptions of others are in a note as well.
        """
        streams = [self._driver.current_stream(device) for device in devices]
        results: dict[int, _T] = {}
        errors: dict[int, BaseException] = {}

        def work(place: int) -> None:
            try:
                with self.on(devices[place], streams[place]):
                    results[place] = tasks[place]()
            except BaseException as error:  # noqa: BLE001 (raised below, in the calling thread)
                errors[place] = error

        threads = [
            threading.Thread(
                target=copy_context().run, args=(work, place), name=f"replica on cuda:{device}"
            )
            for place, device in enumerate(devices)
            if place
        ]
        started: list[threading.Thread] = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            work(0)
        finally:
            for thread in started:
                thread.join()
        if errors:
            _raise_first(errors, devices)
        return [results[place] for place in range(len(tasks))]


def _raise_first(errors: dict[int, BaseException], devices: Sequence[int]) -> None:
    first, *others = sorted(errors)
    error = errors[first]
    error.add_note(f"raised in the replica on cuda:{devices[first]}")
    for place in others:
        other = errors[place]
        error.add_note(f"on cuda:{devices[place]}: {type(other).__qualname__}: {other}")
    # The traceback refers to the frame that holds these: whole activations would outlive it.
    errors.clear()
    raise error


def divide_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, device_ids: Sequence[int], on: Devices
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each replica, on its device: equal parts along ``dim``.

    The parts are those of ``torch.chunk``: all of ceil(rows / devices) rows but the last, so there
    may be fewer parts than devices. Arrays without ``dim`` are copied to each device, other values
    given to each.

    Raises ValueError for arrays that disagree in their rows.
    """
    every = [*all_leaves(args, "args"), *all_leaves(kwargs, "kwargs")]
    rows: dict[str, int] = {p: leaf.shape[dim] for p, leaf in every if _is_divided(leaf, dim)}
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(
            f"the inputs differ in their size along dim {dim}: {listed}; expected the same, which "
            "is divided among the devices"
        )
    total = next(iter(rows.values()), 0)
    size = max(-(-total // len(device_ids)), 1)
    shares: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for device, begin in zip(device_ids, range(0, max(total, 1), size), strict=False):

        def part(_: str, leaf: Any, device: int = device, begin: int = begin) -> Any:
            if not _is_real_array(leaf):
                return leaf
            whole = not _is_divided(leaf, dim)
            return on.put(leaf if whole else leaf[_along(dim, begin, begin + size)], device)

        shares.append((map_leaves(part, args), map_leaves(part, kwargs)))
    return shares


def first_device(value: Any, on: Devices) -> int | None:
    """Return the device of the first array in ``value``; None if that is the host or none."""
    return next((on.device_of(leaf) for _, leaf in all_leaves(value) if _is_real_array(leaf)), None)


@dataclass(frozen=True, slots=True)
class Joined:
    """How an array of the output was made of the replicas' results: so its gradient is divided."""

    dim: int
    rows: tuple[int, ...]
    """The size of each replica's part along ``dim``."""
    numbers: bool
    """Whether each replica gave a number, one element of the array."""


Plan = Any
"""A ``Joined`` for each array of the output, nested as that is; None for what is no array."""


def plan_of(outputs: Sequence[Any], dim: int) -> Plan:
    """Return how ``outputs``, one of each replica, are to be joined.

    Raises TypeError and ValueError, naming the place, where that is not possible.
    """

    def how(path: str, *leaves: Any) -> Joined | None:
        if all(_is_divided(leaf, dim) for leaf in leaves):
            return Joined(dim, tuple(leaf.shape[dim] for leaf in leaves), numbers=False)
        if all(_is_number(leaf) for leaf in leaves):
            return Joined(0, (1,) * len(leaves), numbers=True)
        if any(_is_real_array(leaf) for leaf in leaves):
            shapes = [list(getattr(leaf, "shape", ())) for leaf in leaves]
            raise ValueError(
                f"{path} has shapes {shapes} in the replicas; expected arrays that have dim {dim}, "
                "or one number of each replica"
            )
        if any(leaf is not leaves[0] and leaf != leaves[0] for leaf in leaves):
            raise TypeError(
                f"{path} is {' and '.join(map(repr, leaves))} in the replicas; expected arrays, "
                "numbers, or the same in all"
            )
        return None

    return map_leaves(how, *outputs, path="output")


def join_outputs(plan: Plan, outputs: Sequence[Any], device: int, on: Devices) -> Any:
    """Return the replicas' outputs as one on ``device``: arrays along the plan's dim, numbers as a
    vector with one element of each replica, of other values the first replica's.
    """

    def join(_: str, how: Joined | None, *leaves: Any) -> Any:
        if how is None:
            return leaves[0]
        return _concatenated(leaves, how.dim, device, on, numbers=how.numbers)

    return map_leaves(join, plan, *outputs)


def divide_gradients(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device_ids: Sequence[int],
    on: Devices,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each replica's backward, on its device.

    One argument is the gradient of the whole output; several are those of its entries. What is no
    array (None, a factor) is given to all.

    Raises ValueError for gradients that do not fit the output.
    """
    several = len(args) + len(kwargs) > 1
    if several and (kwargs or not isinstance(plan, list | tuple)):
        raise TypeError(
            f"backward got {len(args)} positional and {len(kwargs)} named arguments; expected one, "
            "the gradient of the output, or one for each entry of an output that is a tuple, by "
            "position"
        )

    def share(place: int, device: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def part(path: str, how: Joined | None, grad: Any) -> Any:
            if how is None or not _is_real_array(grad):
                return grad
            total = sum(how.rows)
            if grad.ndim <= how.dim or grad.shape[how.dim] != total:
                raise ValueError(
                    f"{path} must have size {total} along dim {how.dim}, as the output that it is "
                    f"the gradient of, got shape {list(grad.shape)}"
                )
            begin = sum(how.rows[:place])
            own = grad[_along(how.dim, begin, begin + how.rows[place])]
            return on.put(own.reshape(()) if how.numbers else own, device)

        if several:
            return map_leaves(part, plan, args, path="gradient"), {}
        return (
            tuple(map_leaves(part, plan, grad, path="gradient") for grad in args),
            {name: map_leaves(part, plan, grad, path=name) for name, grad in kwargs.items()},
        )

    return [share(place, device) for place, device in enumerate(device_ids)]


def join_gradients(results: Sequence[Any], dim: int, device: int, on: Devices) -> Any:
    """Return the gradient of the whole input, on ``device``.

    Parts are put together along ``dim``; of what each replica got as a whole, gradients are added,
    in the order of the replicas.
    """

    def join(path: str, *leaves: Any) -> Any:
        if all(_is_divided(leaf, dim) for leaf in leaves):
            return _concatenated(leaves, dim, device, on)
        if all(leaf is None for leaf in leaves):
            return None
        if any(leaf is None for leaf in leaves):
            raise TypeError(f"{path} is None in some of the replicas only")
        with on.on(device):
            first, *others = [on.put(x, device) if _is_real_array(x) else x for x in leaves]
            # Not in place: a backward may return an array that is not its own.
            return reduce(add, others, first)

    return map_leaves(join, *results, path="the input's gradient")


def _concatenated(
    leaves: Sequence[Any], dim: int, device: int, on: Devices, *, numbers: bool = False
) -> Array:
    if not numbers and len(leaves) == 1:
        return on.put(leaves[0], device)
    with on.on(device):
        parts = on.put_all([np.asarray(x) if _is_plain(x) else x for x in leaves], device)
        parts = [part.reshape(1) for part in parts] if numbers else parts
        return namespace(parts[0]).concatenate(parts, axis=dim)


def _along(dim: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(begin, end))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.generic)


def _is_real_array(value: Any) -> bool:
    # A scalar of NumPy's is a number, of no device.
    return is_array(value) and not isinstance(value, np.generic)


def _is_number(value: Any) -> bool:
    return _is_plain(value) or (_is_real_array(value) and value.ndim == 0)


def _is_divided(value: Any, dim: int) -> bool:
    return _is_real_array(value) and value.ndim > dim
