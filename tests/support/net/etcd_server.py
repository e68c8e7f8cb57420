"""An etcd of the tests' own, of one member or several; if there is none, its tests are skipped.

``make test-etcd`` installs it (Debian's etcd-server).
"""

from __future__ import annotations

import http.client
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.net.ports import reserved_port

_SECONDS = 60.0
PROGRAM = shutil.which("etcd")
SKIPPED = "there is no etcd here: make test-etcd installs Debian's"


class EtcdServer:
    """Members of one cluster, each a process with its data in ``folder``."""

    def __init__(
        self, folder: Path, ports: list[tuple[int, int]], options: tuple[str, ...], scheme: str
    ) -> None:
        self._folder = folder
        self._options = options
        self._scheme = scheme
        self._ports = ports
        self.hosts = [f"127.0.0.1:{port}" for port, _ in ports]
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def url(self, prefix: str = "") -> str:
        """Return the URL of a place that nobody else uses."""
        return f"etcd://{','.join(self.hosts)}/{prefix or secrets.token_hex(8)}"

    def start(self, number: int) -> None:
        client, peer = self._ports[number]
        peers = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, (_, port) in enumerate(self._ports))
        assert PROGRAM is not None
        with open(self._folder / f"log{number}", "ab") as log:
            self._running[number] = subprocess.Popen(
                [
                    *(PROGRAM, "--name", f"m{number}", "--data-dir", self._folder / f"m{number}"),
                    *("--listen-client-urls", f"{self._scheme}://127.0.0.1:{client}"),
                    *("--advertise-client-urls", f"{self._scheme}://127.0.0.1:{client}"),
                    *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                    *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                    *("--initial-cluster", peers, "--unsafe-no-fsync", *self._options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self, number: int) -> None:
        """Wait until the member serves."""
        until = time.monotonic() + _SECONDS
        while time.monotonic() < until:
            connection = http.client.HTTPConnection(self.hosts[number], timeout=1)
            with closing(connection), suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/health")
                if b'"true"' in connection.getresponse().read():
                    return
            time.sleep(0.02)
        raise AssertionError((self._folder / f"log{number}").read_text()[-2000:])

    def signal(self, number: int, what: signal.Signals) -> None:
        self._running[number].send_signal(what)

    def kill(self, number: int) -> None:
        process = self._running.pop(number)
        process.kill()
        process.wait()

    def close(self) -> None:
        for number in list(self._running):
            self.kill(number)


@contextmanager
def etcd_of(
    folder: Path, members: int = 1, options: tuple[str, ...] = (), scheme: str = "http"
) -> Generator[EtcdServer]:
    """Run a cluster; skip the test where that is impossible."""
    if PROGRAM is None:
        pytest.skip(SKIPPED)
    with ExitStack() as stack:
        ports = [
            (stack.enter_context(reserved_port()), stack.enter_context(reserved_port()))
            for _ in range(members)
        ]
        server = EtcdServer(folder, ports, options, scheme)
        stack.callback(server.close)
        for number in range(members):
            server.start(number)
        if scheme == "http":
            for number in range(members):
                server.wait(number)
        yield server
