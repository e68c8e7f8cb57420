"""The fork server: the process from which ranks are forked. ``starting`` has the launcher's side.

It imports NumPy and this package while it has no other thread, and forks on request. Ranks share
the loaded modules and their memory. It imports little else, because the ranks wait for it.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from types import ModuleType

from transport._platform import thread_names

LENGTH = struct.Struct("!I")
"""The length that precedes each order. The answer is the rank's process id, or 0 if none."""
_ADOPTION_SECONDS = 10.0
PRELOADED = (
    "numpy",
    "meshlib._c10d.batch",
    "meshlib._c10d.functions.arrays",
    "meshlib._c10d.functions.barriers",
    "meshlib._c10d.functions.coalesced",
    "meshlib._c10d.functions.gathered",
    "meshlib._c10d.functions.objects",
    "meshlib._c10d.functions.personalized",
    "meshlib._c10d.groups",
    "meshlib._job.starting.init",
    "meshlib._mesh.init",
    "transport._hierarchical.auto",
    "ctypes",
    "faulthandler",
    "traceback",
)
"""Modules that ranks find imported. None starts a thread or reads state that differs by rank."""
_NOT_SHARED = ("__main__", "builtins", "sys")


def serve(descriptor: int, parent: int) -> str:
    """Fork for each order from ``descriptor``; return in each child, with its flags.

    The server itself does not return: it ends with the launcher, process ``parent``, or when the
    launcher closes its end. It answers 0 if forking is not safe or imports failed.
    """
    orders = socket.socket(fileno=descriptor)
    able = _preload()
    while True:
        header, descriptors, _, _ = socket.recv_fds(orders, LENGTH.size, 2)
        body = receive(orders, LENGTH.unpack(header)[0]) if header else b""
        if not body:
            os._exit(0)
        child = _fork(parent) if able else -1
        if child == 0:
            import json  # already imported by meshlib; the server's start need not wait for it

            orders.close()
            order = json.loads(body)
            _become(order, descriptors)
            return order["flags"]
        for number in descriptors:
            os.close(number)
        orders.sendall(LENGTH.pack(max(child, 0)))


def _preload() -> bool:
    """Import the modules for the ranks; return whether this process may be forked."""
    import atexit
    import gc
    import importlib

    shared: dict[str, ModuleType] = {}
    atexit.register(_leave, shared)  # registered before the imports' functions, so called last
    gc.disable()  # imports create no garbage
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 (the program gets the error if it needs the module)
            return False
    shared.update(sys.modules)
    for name in _NOT_SHARED:
        shared.pop(name, None)
    # A reference cycle that is never collected keeps the modules alive until the process ends.
    forever: list[object] = [shared]
    forever.append(forever)
    gc.freeze()  # a collection in a rank must not copy shared pages
    gc.enable()
    return len(thread_names() or ()) == 1  # if the number is unknown, no fork is safe


def _leave(shared: dict[str, ModuleType]) -> None:
    """Keep Python from clearing the shared modules at its exit, which would copy their pages.

    The program's own objects are released as usual.
    """
    for name, module in shared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]  # Python clears only modules in sys.modules


def _fork(parent: int) -> int:
    """Fork twice; return the grandchild's id, or 0 in it once ``parent`` has adopted it."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(writer, LENGTH.pack(child))
            os._exit(0)
        os.close(reader)
        os.close(writer)
        end = time.monotonic() + _ADOPTION_SECONDS
        while os.getppid() != parent and time.monotonic() < end:
            time.sleep(1e-4)
        return 0
    os.close(writer)
    with open(reader, "rb") as pipe:
        data = pipe.read(LENGTH.size)
    os.waitpid(between, 0)
    return LENGTH.unpack(data)[0] if data else -1


def _become(order: dict[str, object], descriptors: list[int]) -> None:
    """Turn this process into the rank of ``order``."""
    os.setsid()
    streams: list[int] = order["streams"]  # pyright: ignore[reportAssignmentType]
    for number, own in zip(streams, descriptors, strict=True):
        os.dup2(own, number)
        os.close(own)
    variables: dict[str, str] = order["variables"]  # pyright: ignore[reportAssignmentType]
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's own generator does this by itself after a fork


def receive(source: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes, or no bytes if ``source`` has ended."""
    data = b""
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data
