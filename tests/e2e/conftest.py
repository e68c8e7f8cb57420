"""Running ``meshrun`` as a user does, with a deadline, and looking at what it leaves behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.net.networks import Network, can_make_networks

DEADLINE = 100.0

LONG_WINDOWS = """
    from meshlib._launcher import agent
    from meshlib._launcher.ranks import workers
    workers.SETTLE_SECONDS = workers.SETTLE_AFTER_ECHO_SECONDS = 60
    agent._SAME_SIGNAL_SECONDS = workers._A_MOMENT = 60
"""


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


class Meshrun:
    """Starts launchers whose every descendant carries a mark in its environment."""

    COMMAND = (sys.executable, "-m", "meshlib._launcher")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._mark = f"MESHRUN_TEST={secrets.token_hex(8)}"
        self._launchers: list[subprocess.Popen[str]] = []

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a program and return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def environment(self, **variables: str) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return dict(os.environ) | {"TMPDIR": str(self.temporary), name: value} | variables

    def long_windows(self) -> dict[str, str]:
        """Return variables for launchers that wait long for related events.

        These are the cause and the echoes of a failure, and the signals of an engine.
        """
        self.script(LONG_WINDOWS, "sitecustomize.py")  # Python runs it when it begins
        return {"PYTHONPATH": str(self.folder)}

    def start(self, *arguments: str, command=None, env=None, **options) -> subprocess.Popen[str]:
        """Start a launcher in a session of its own, so that signals reach it alone."""
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
            "cwd": self.folder,
        } | options
        process = subprocess.Popen(
            [*(command or self.COMMAND), *arguments],
            env=self.environment(**(env or {})),
            text=True,
            **options,
        )
        self._launchers.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], deadline: float = DEADLINE) -> Finished:
        out, err = process.communicate(timeout=deadline)
        return Finished(process.returncode, out or "", err or "")

    def run(self, *arguments: str, deadline: float = DEADLINE, **options) -> Finished:
        return self.finish(self.start(*arguments, **options), deadline)

    def processes(self) -> list[int]:
        """Return every process alive that any launcher of this test has led to."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
                state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if self._mark.encode() in variables and state != "Z":
                found.append(int(name))
        return found

    def wait_until_gone(self, deadline: float = 60.0) -> list[int]:
        """Return the processes that are still there after ``deadline`` seconds."""
        self.wait_for(lambda: not self.processes(), deadline)
        return self.processes()

    @staticmethod
    def wait_for(condition, deadline: float = DEADLINE) -> bool:
        """Wait until ``condition()`` holds; return whether it did in time."""
        end = time.monotonic() + deadline
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def files_left(self) -> list[str]:
        return sorted(str(path) for path in self.temporary.rglob("*"))

    def kill_everything(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._launchers:
            process.kill()
            process.wait(60)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def meshrun(tmp_path: Path) -> Iterator[Meshrun]:
    """A ``Meshrun`` that fails the test when a process or a temporary file is left."""
    runner = Meshrun(tmp_path)
    try:
        yield runner
        assert runner.wait_until_gone() == [], "processes were left behind"
        assert runner.files_left() == [], "files were left behind"
    finally:
        runner.kill_everything()


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """As many hosts as the test's parameter says."""
    if not can_make_networks():
        pytest.skip("needs root, iproute2 and network namespaces")
    made = Network(request.param)
    yield made
    made.close()


@pytest.fixture
def start_hosts(meshrun: Meshrun, network: Network) -> Callable[..., list[subprocess.Popen[str]]]:
    """Start a launcher on each host."""

    def start(script, *flags, arguments=(), ranks=1):
        path = meshrun.script(script)
        secret = {"MESHLIB_SECRET": secrets.token_hex(32)}
        count = len(network.names)
        return [
            meshrun.start(
                *(f"--nnodes={count}", f"--node-rank={index}", f"--nproc-per-node={ranks}"),
                *(f"--master-addr={network.address(0)}", *flags, path, *arguments),
                command=(*network.command(index), *meshrun.COMMAND),
                env=secret,
            )
            for index in range(count)
        ]

    return start
