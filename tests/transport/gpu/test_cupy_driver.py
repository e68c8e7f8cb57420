"""The driver on top of CuPy, where it depends on what CuPy's functions do with CUDA's answers.

CuPy is a stand-in here. It answers as CuPy 14 does: ``eventQuery`` returns CUDA's status, other
functions raise it; a thread has no context before it has chosen a device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from transport._cuda.driver import cuda_driver
from transport._errors import DistBackendError
from transport._nccl.library import load_nccl

NOT_READY, INSUFFICIENT, NO_DEVICE, ILLEGAL_ADDRESS = 600, 35, 100, 700
NAMES = {
    INSUFFICIENT: "cudaErrorInsufficientDriver",
    NO_DEVICE: "cudaErrorNoDevice",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress",
}


class Cuda:
    """The stand-in's answers and recorded requests."""

    def __init__(self) -> None:
        self.status = 0
        self.wait_status = 0
        self.waits: list[int] = []
        self.kernels: list[str] = []
        self.waited_on: list[int] = []
        self.thread = threading.local()


class RuntimeFailure(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"{NAMES.get(status, 'cudaError')}: it failed")
        self.status = status


def stand_in(cuda: Cuda) -> ModuleType:
    def answer(value: Any) -> Any:
        def function(*_: Any) -> Any:
            if cuda.status:
                raise RuntimeFailure(cuda.status)
            return value

        return function

    def choose(device: int) -> None:
        answer(None)()
        cuda.thread.device = device

    @contextmanager
    def on(device: int) -> Iterator[None]:
        before = getattr(cuda.thread, "device", None)
        if before != device and device:  # CuPy chooses no device that is the current one already
            choose(device)
        try:
            yield
        finally:
            if before is not None:
                choose(before)

    def wait_event(*_: int) -> None:
        cuda.waited_on.append(cuda.thread.device)

    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeFailure,
        eventCreateWithFlags=answer(7),
        eventRecord=answer(None),
        eventQuery=lambda _: cuda.status,
        eventDestroy=answer(None),
        streamWaitEvent=wait_event,
        getDeviceCount=answer(2),
        setDevice=choose,
        pointerGetAttributes=answer(SimpleNamespace(device=0)),
        ipcGetMemHandle=lambda base: f"handle of {base}".encode(),
        ipcOpenMemHandle=answer(4096),
    )

    def module(**_: Any) -> Any:
        return SimpleNamespace(
            get_function=lambda name: lambda *_: cuda.kernels.append(name),
        )

    found = ModuleType("cupy")
    found.__version__ = "14.2.0"
    found.cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {})),
        Device=on,
        Stream=SimpleNamespace(from_external=lambda _: on(0)),
    )
    found.RawModule = module
    return found


class Libcuda:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: Any) -> int:
        if getattr(self.cuda.thread, "device", None) is None:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        base._obj.value = pointer.value - pointer.value % 4096
        return 0

    def cuStreamWaitValue64_v2(self, _: Any, address: Any, *__: Any) -> int:
        self.cuda.waits.append(address.value)
        return self.cuda.wait_status


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    monkeypatch.setitem(sys.modules, "cupy", stand_in(found))
    monkeypatch.delitem(sys.modules, "transport._cuda.cupy_driver", raising=False)
    cuda_driver.cache_clear()
    module = import_module("transport._cuda.cupy_driver")
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: Libcuda(found))
    yield found
    found.status = 0
    sys.modules.pop("transport._cuda.cupy_driver", None)
    cuda_driver.cache_clear()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"available": False}, "CuPy finds no libnccl.*pip install nccl4py"),
        ({"available": True, "get_version": lambda: 2708}, "NCCL 2.7.8 is too old; expected 2.10"),
    ],
)
def test_a_missing_or_old_nccl_is_an_error_with_the_remedy(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], message: str
) -> None:
    module = ModuleType("cupy.cuda.nccl")
    functions = dict.fromkeys(["get_unique_id", "groupStart", "groupEnd"], lambda: None)
    vars(module).update(functions, NcclCommunicator=object, NcclError=RuntimeError, **found)
    package = ModuleType("cupy.cuda")
    monkeypatch.setitem(sys.modules, "cupy.cuda", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", module)
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(DistBackendError, match=message):
        load_nccl()


def test_a_cupy_that_is_too_old_is_refused(cuda: Cuda) -> None:
    sys.modules["cupy"].__version__ = "13.6.0"
    with pytest.raises(DistBackendError, match=r"CuPy 13\.6\.0 is too old; expected 14"):
        cuda_driver()


def test_an_event_is_over_once_cuda_reports_it(cuda: Cuda) -> None:
    event = cuda_driver().create_event(0)
    cuda.status = NOT_READY
    assert not event.query()
    cuda.status = 0
    assert event.query()
    cuda.status = ILLEGAL_ADDRESS
    with pytest.raises(DistBackendError, match=r"IllegalAddress.*later calls on it fail"):
        event.query()


@pytest.mark.parametrize(
    ("status", "hint"),
    [(INSUFFICIENT, "install a newer driver"), (NO_DEVICE, "see CUDA_VISIBLE_DEVICES")],
)
def test_a_missing_driver_or_gpu_is_an_error_with_the_remedy(
    cuda: Cuda, status: int, hint: str
) -> None:
    driver = cuda_driver()
    cuda.status = status
    with pytest.raises(DistBackendError, match=hint):
        driver.device_count()


def test_memory_is_shared_from_a_thread_that_has_used_no_device(cuda: Cuda) -> None:
    """Calls with async_op begin in the group's own thread."""
    driver, found = cuda_driver(), list[tuple[bytes, int]]()
    thread = threading.Thread(target=lambda: found.append(driver.share(4096 + 24)))
    thread.start()
    thread.join(60)
    assert found == [(b"handle of 4096", 24)]


def test_a_peer_s_memory_that_cannot_be_opened_is_an_error_with_the_remedy(cuda: Cuda) -> None:
    driver = cuda_driver()
    assert driver.open(b"handle", 0) == 4096
    cuda.status = 217  # cudaErrorPeerAccessUnsupported
    with pytest.raises(DistBackendError, match=r"no peer access.*'cuda:staged'"):
        driver.open(b"handle", 0)
    cuda.status = 0


def test_a_default_stream_that_waits_is_the_one_of_the_event_s_device(cuda: Cuda) -> None:
    driver = cuda_driver()
    cuda.thread.device = 0
    driver.wait_event(0, driver.create_event(1))
    assert cuda.waited_on == [1]
    assert cuda.thread.device == 0
    driver.wait_event(0, driver.create_event(0), 1)  # unless another one is named
    assert cuda.waited_on == [1, 1]
    assert cuda.thread.device == 0


def test_the_front_end_waits_and_a_kernel_only_where_it_cannot(cuda: Cuda) -> None:
    driver = cuda_driver()
    driver.wait_value([8, 16], 3, 5)
    assert cuda.waits == [8, 16]
    assert not cuda.kernels
    cuda.wait_status = 801  # CUDA_ERROR_NOT_SUPPORTED
    driver.wait_value([8, 16], 4, 5)
    driver.wait_value([8, 16], 5, 5)
    assert cuda.waits == [8, 16, 8], "asked once more after it had refused"
    assert cuda.kernels == ["wait_for_flags"] * 2
