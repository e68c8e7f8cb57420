"""The choice of TLS for connections.

It imports TLS only for jobs that use it, because Python's ``ssl`` module is slow to import.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

from transport import _environment as environment

if TYPE_CHECKING:
    from transport._net.tls import Tls, TlsSocket


def tls_from_environment(variables: Mapping[str, str] | None = None) -> Tls | None:
    """Return TLS with the files in ``MESHLIB_TLS_CERT``, ``_KEY`` and ``_CA``.

    Return None if none is set. Raises ValueError if only some are set, or a file is unusable.
    """
    variables = os.environ if variables is None else variables
    files = [variables.get(name, "") for name in environment.TLS]
    if not any(files):
        return None
    if not all(files):
        missing = [name for name, file in zip(environment.TLS, files, strict=True) if not file]
        raise ValueError(
            f"{' and '.join(missing)} not set: TLS needs all of {', '.join(environment.TLS)},"
            " or none"
        )
    from transport._net.tls import Tls

    return Tls(*files)


def is_tls(sock: socket.socket) -> TypeGuard[TlsSocket]:
    """Return whether ``sock`` is a ``TlsSocket``."""
    tls = sys.modules.get("transport._net.tls")  # if not imported, no socket uses TLS
    return tls is not None and isinstance(sock, tls.TlsSocket)
