"""The GPUs of one process: which one an array is on, copies between them, work on all at once.

Experimental, not run on a GPU (``docs/gpu.md``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from importlib import import_module
from typing import TypeVar

from meshlib import DistBackendError
from meshlib.extend import Driver, driver_of
from parallel._arrays import Array, namespace

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
