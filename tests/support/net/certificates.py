"""Certificates for the tests of TLS, made anew in each process that runs them."""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from transport import _environment as environment
from transport._net.tls import Tls


@dataclass(frozen=True)
class Files:
    """A certificate with its key, and the authority to trust, as PEM files."""

    cert: Path
    key: Path
    ca: Path

    @property
    def variables(self) -> dict[str, str]:
        names = environment.TLS_CERT, environment.TLS_KEY, environment.TLS_CA
        return dict(zip(names, map(str, (self.cert, self.key, self.ca)), strict=True))

    def tls(self) -> Tls:
        return Tls(self.cert, self.key, self.ca)


class Authority:
    """A certificate authority whose files live in ``folder``."""

    def __init__(self, folder: Path) -> None:
        import trustme  # has no wheel for each Python that the rest is tested on

        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(folder / "ca.pem")

    def issue(self, name: str, not_after: datetime | None = None) -> Files:
        issued = self._ca.issue_cert(f"{name}.test", not_after=not_after)
        files = Files(
            self._folder / f"{name}.pem", self._folder / f"{name}.key", self._folder / "ca.pem"
        )
        for i, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(files.cert, append=i > 0)
        issued.private_key_pem.write_to_path(files.key)
        return files


LONG_AGO = datetime(2001, 1, 1, tzinfo=UTC)

_MAKING = threading.Lock()


def tls_of_the_tests() -> Tls:
    """What all ranks of a test may share; several of them may ask first, at the same time."""
    with _MAKING:
        return _make_tls()


@cache
def _make_tls() -> Tls:
    with tempfile.TemporaryDirectory() as folder:
        return Authority(Path(folder)).issue("rank").tls()
