"""How ranks' processes are started: what they are told, and by which of two ways they begin.

meshrun, spawn and the adapters of engines tell a rank its place in the same variables, by which
``init_process_group()`` finds the job.

A rank that is started by ``exec`` imports NumPy and this package anew, a quarter of a second of one
core each. By ``fork`` one process does it, while it has no other thread, and forks: ranks share
what was loaded, and its memory. The launcher adopts them (it is their subreaper, and a process in
between ends at once), so that it waits for them, signals them and is missed by them as by its own.
In a rank the program runs as ``bootstrap`` would run it: the server is that file, and each child
goes on in it with an environment, output and session of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from meshlib.launcher.ranks import bootstrap
from transport import environment

if TYPE_CHECKING:
    from meshlib.launcher.options.launch import LaunchOptions, Program
    from meshlib.launcher.ranks.output import RankStreams

_LENGTH = struct.Struct("!I")
_ADOPTION_SECONDS = 10.0
_ANSWER_SECONDS = 20.0
"""What imports that hang may take: after that ranks begin by themselves, and show where."""
PRELOADED = ("numpy", "meshlib.api", "transport.auto", "ctypes", "faulthandler", "traceback")
"""What ranks find imported. Nothing that starts a thread, or reads what differs between ranks."""
_NOT_SHARED = ("__main__", "builtins", "sys")
_OF_A_LAUNCH = (environment.MESH, environment.LAUNCHER, environment.ERROR_FILE)


@dataclass(frozen=True, slots=True)
class Placement:
    """A node's place in one attempt to run the job, and the store that its ranks use."""

    attempt: int
    node: int
    nodes: int
    first_rank: int
    ranks: int
    world_size: int
    store_host: str
    store_port: int
    secret: str

    def variables(self) -> dict[str, str]:
        """Return what is equal for all ranks of the node."""
        secret = {environment.SECRET: self.secret} if self.secret else {}
        return secret | {
            environment.WORLD_SIZE: str(self.world_size),
            environment.LOCAL_WORLD_SIZE: str(self.ranks),
            environment.GROUP_RANK: str(self.node),
            environment.GROUP_WORLD_SIZE: str(self.nodes),
            environment.MASTER_ADDR: self.store_host,
            environment.MASTER_PORT: str(self.store_port),
            environment.AGENT_STORE: f"{self.store_host}:{self.store_port}",
            environment.RESTART_COUNT: str(self.attempt),
        }

    def variables_of(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return what is a rank's own."""
        own = {environment.RANK: str(rank), environment.LOCAL_RANK: str(local_rank)}
        return own | ({environment.JOIN: "1"} if rank >= self.world_size else {})


def node_environment(
    inherited: Mapping[str, str], placement: Placement, mine: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the whole environment of a node's ranks: ``inherited``, with what leads them to the
    job, and what ``mine`` has that is not None.

    What a launch around this one has said of its own ranks is gone.
    """
    variables = {name: text for name, text in inherited.items() if name not in _OF_A_LAUNCH}
    for name in environment.TLS:
        if variables.get(name):
            variables[name] = os.path.abspath(variables[name])  # ranks may change directory
    variables |= placement.variables()
    return variables | {name: text for name, text in mine.items() if text is not None}


def limit_threads(variables: dict[str, str], ranks: int) -> None:
    """Have one of several ``ranks`` compute with one thread, unless somebody has chosen.

    Ranks that each start a thread for every core are slower than ranks with one.
    """
    if ranks > 1:
        variables.setdefault("OMP_NUM_THREADS", "1")


class ForkedRank:
    """A rank's process, with the methods of ``subprocess.Popen`` that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Collect the process if it has ended; return its exit code, -n for signal n."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process has ended and return its exit code."""
        return self._collect(0)

    def _collect(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # collected by somebody else, who did not keep its status
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """The launcher's side: a process that forks ranks when asked to.

    It is started at once, and imports while the launcher gets ready. ``command(flags)`` is what
    starts bootstrap with these flags; ``variables`` is a rank's environment as far as it is known.
    """

    def __init__(self, command: Callable[[str], list[str]], variables: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                command(f"{bootstrap.SERVE}{theirs.fileno()}"),
                env=dict(variables),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def fork(
        self, flags: str, variables: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> ForkedRank | None:
        """Start a rank with the ``variables`` and descriptors (None: the launcher's own).

        ``flags`` are bootstrap's. Returns None where ranks cannot be forked: they are to be started
        otherwise.
        """
        order = {
            "flags": flags,
            "variables": dict(variables),
            "streams": [number for number, own in ((1, stdout), (2, stderr)) if own is not None],
        }
        descriptors = [own for own in (stdout, stderr) if own is not None]
        body = json.dumps(order).encode()
        try:
            socket.send_fds(self._socket, [_LENGTH.pack(len(body))], descriptors)
            self._socket.sendall(body)
            answer = _receive(self._socket, _LENGTH.size)
        except OSError:  # it has ended, or hangs
            answer = b""
        pid = _LENGTH.unpack(answer)[0] if answer else 0
        if not pid:
            self.close()  # nothing may come of it later
        return ForkedRank(pid) if pid else None

    def close(self) -> None:
        """End the server; the ranks go on. Idempotent."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def start_server(options: LaunchOptions, run_id: str) -> ForkServer | None:
    """Start what this node's ranks are forked from, if they are to be."""
    if options.start != "fork" or options.program.kind == "program":
        return None
    variables = {**os.environ, environment.RUN_ID: run_id}
    limit_threads(variables, options.ranks)
    try:
        with _interrupt_later():
            return ForkServer(partial(_command_line, options.program), variables)
    except OSError:  # out of processes or descriptors: each rank will tell better
        return None


def start(
    program: Program, ends: RankStreams, variables: Mapping[str, str], server: ForkServer | None
) -> subprocess.Popen[bytes] | ForkedRank:
    """Start a rank that runs ``program``, with the output ``ends`` and all of its ``variables``;
    from ``server``, if there is one and it can.
    """
    flags = "-" if ends.inherited else "-l"
    if not ends.logged:  # a log keeps each rank's traceback; the console gets only the first
        flags += "q"
    if server is not None:
        forked = server.fork(flags, variables, ends.stdout, ends.stderr)
        if forked is not None:
            return forked
    with _interrupt_later():
        return subprocess.Popen(
            _command_line(program, flags),
            env=variables,
            stdout=ends.stdout,
            stderr=ends.stderr,
            start_new_session=True,
        )


def _command_line(program: Program, flags: str) -> list[str]:
    """Return what starts ``program`` in a rank: this Python, and in it ``bootstrap``."""
    python = [sys.executable]
    if program.kind == "program":
        python += ["-I", "-S"]
    return [
        *python,
        bootstrap.__file__,
        str(os.getpid()),
        flags,
        program.kind,
        program.target,
        *program.arguments,
    ]


@contextlib.contextmanager
def _interrupt_later() -> Generator[None]:
    """Have a process that is started in the block find SIGINT blocked: ``bootstrap`` lets it in.

    Python would print where in its own beginning Ctrl-C came, and in each rank.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(descriptor: int, parent: int) -> str:
    """Fork for each order that comes through ``descriptor``; return, in each child, its flags.

    The server itself does not return: it ends with the launcher, process ``parent``, or when that
    closes its side. It refuses (process 0) where forking is not safe or imports failed.
    """
    orders = socket.socket(fileno=descriptor)
    able = _preload()
    while True:
        header, descriptors, _, _ = socket.recv_fds(orders, _LENGTH.size, 2)
        body = _receive(orders, _LENGTH.unpack(header)[0]) if header else b""
        if not body:
            os._exit(0)
        order = json.loads(body)
        child = _fork(parent) if able else -1
        if child == 0:
            orders.close()
            _become(order, descriptors)
            return order["flags"]
        for number in descriptors:
            os.close(number)
        orders.sendall(_LENGTH.pack(max(child, 0)))


def _preload() -> bool:
    """Import what ranks need; return whether this process may be forked."""
    import atexit
    import gc
    import importlib

    shared: dict[str, ModuleType] = {}
    atexit.register(_leave, shared)  # before all that imports register, and so called after it
    gc.disable()  # nothing of what is imported is garbage: every look at it would be in vain
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 (the program will see it for itself, if it needs it)
            return False
    shared.update(sys.modules)
    for name in _NOT_SHARED:
        shared.pop(name, None)
    # It lives, in a rank, until the process is gone: a circle that no collector sees any more.
    forever: list[object] = [shared]
    forever.append(forever)
    gc.freeze()  # a collection in one rank must not make copies of what all share
    gc.enable()
    return len(os.listdir("/proc/self/task")) == 1


def _leave(shared: dict[str, ModuleType]) -> None:
    """Keep Python's end from taking apart what all ranks share: each would first copy its pages,
    half of all that it ever copies. What the program itself has made ends as ever.
    """
    for name, module in shared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]  # what is not found there is not cleared, as long as it lives


def _fork(parent: int) -> int:
    """Fork twice; return 0 in the grandchild once ``parent`` has adopted it, its number here."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(writer, _LENGTH.pack(child))
            os._exit(0)
        os.close(reader)
        os.close(writer)
        end = time.monotonic() + _ADOPTION_SECONDS
        while os.getppid() != parent and time.monotonic() < end:
            time.sleep(1e-4)
        return 0
    os.close(writer)
    with open(reader, "rb") as pipe:
        told = pipe.read(_LENGTH.size)
    os.waitpid(between, 0)
    return _LENGTH.unpack(told)[0] if told else -1


def _become(order: dict[str, object], descriptors: list[int]) -> None:
    """Make this process the rank that ``order`` describes."""
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
        numpy_random.seed()  # as Python's own generator does by itself after a fork


def _receive(source: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes, or none where ``source`` has ended."""
    data = b""
    while len(data) < size:
        piece = source.recv(size - len(data))
        if not piece:
            return b""
        data += piece
    return data
