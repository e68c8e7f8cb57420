"""The page of a job over HTTP, for browsers that know the token.

The page itself has no data of the job, and loads nothing from elsewhere. Its requests have the
token in the ``Authorization`` header, which no other page can make a browser send. The ``Host``
header of a request must be an address or one of this machine's names, which prevents DNS rebinding.
No request changes anything; the request for a rank's stacks is a POST.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socketserver import TCPServer
from typing import Any

from meshlib._monitor.metrics import CONTENT_TYPE, metrics
from meshlib._monitor.watch import JobWatch
from meshlib._monitor.words import as_values
from transport._errors import DistError
from transport._net.sockets import format_address

_REQUEST_SECONDS = 10.0
_MOST_BYTES = 1024
_MOST_REQUESTS = 32
_END_SECONDS = 5.0
_JSON = "application/json"


class PageServer:
    """A server of the page about ``watch``'s job at ``host`` and ``port`` (0: any free one).

    It serves until ``close``. Raises OSError when it cannot listen there.
    """

    def __init__(self, watch: JobWatch, host: str = "127.0.0.1", port: int = 0) -> None:
        self.token: str = secrets.token_urlsafe(24)
        """The secret that each request must contain."""
        self.host = host
        self._server = _JobPageServer((host, port), watch, self.token)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="meshlib-page", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port at which the server listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The page's address. The token is after ``#``, which browsers do not send."""
        host = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host  # noqa: S104 (compared)
        return f"http://{format_address(host, self.port)}/#{self.token}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._thread.join(_END_SECONDS)
        self._server.server_close()


class _JobPageServer(ThreadingHTTPServer):
    block_on_close = False  # a request for the stacks of a silent rank takes seconds
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], watch: JobWatch, token: str) -> None:
        self.watch = watch
        self.token = token
        self.names: frozenset[str] = frozenset(
            name.lower() for name in ("localhost", address[0], socket.gethostname())
        )
        self._places = threading.BoundedSemaphore(_MOST_REQUESTS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without looking up the address's name, which may be slow."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: browsers may disconnect during an answer."""


class _Handler(BaseHTTPRequestHandler):
    server: _JobPageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = _REQUEST_SECONDS
    server_version = "meshlib"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer({"/": self._page, "/job": self._job, "/metrics": self._metrics})

    def do_POST(self) -> None:
        self._answer({"/stacks": self._stacks})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal is the job's."""

    def _answer(self, routes: Mapping[str, Any]) -> None:
        path = self.path.partition("?")[0]
        if not self._is_for_us():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "Host is not a name of this machine")
        elif path not in routes:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
        elif path != "/" and not self._knows_token():
            self._refuse(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")
        else:
            routes[path]()

    def _is_for_us(self) -> bool:
        given = self.headers.get_all("Host", [])
        if len(given) != 1:
            return False
        host = re.sub(r":\d+$", "", given[0].strip()).removeprefix("[").removesuffix("]")
        if host.lower() in self.server.names:
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def _knows_token(self) -> bool:
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.token}"
        return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())

    def _page(self) -> None:
        text, policy = page()
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", text, policy)

    def _job(self) -> None:
        values = self.server.watch.read(lambda view: as_values(view, time.time()))
        self._send(HTTPStatus.OK, _JSON, json.dumps(values).encode())

    def _metrics(self) -> None:
        text = self.server.watch.read(lambda view: metrics(view, time.time()))
        self._send(HTTPStatus.OK, CONTENT_TYPE, text.encode())

    def _stacks(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", "-1"))
            if not 0 <= length <= _MOST_BYTES:
                raise ValueError(f"Content-Length must be from 0 to {_MOST_BYTES}")
            rank = json.loads(self.rfile.read(length))["rank"]
            if not isinstance(rank, int):
                raise TypeError(f"rank is {rank!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f'expected {{"rank": N}}: {error}')
            return
        try:
            stacks = self.server.watch.stacks(rank)
        except ValueError as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except DistError as error:
            self._refuse(HTTPStatus.GATEWAY_TIMEOUT, str(error))
        else:
            self._send(HTTPStatus.OK, _JSON, json.dumps(stacks).encode())

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, _JSON, json.dumps({"error": why}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, policy: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy or "default-src 'none'")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)


@cache
def page() -> tuple[bytes, str]:
    """Return the page, and the policy that allows only the page's own script and style."""
    text = files("meshlib._monitor").joinpath("page.html").read_text(encoding="utf-8")
    style, script = (
        _digest(text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0])
        for tag in ("style", "script")
    )
    policy = (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
