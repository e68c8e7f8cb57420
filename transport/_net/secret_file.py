"""The job's secret: in the environment, or in a file from ``meshlib secret``, for nodes that share
a home directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from transport import _environment as environment

SECRET_BYTES = 32


def secret_from_environment(variables: Mapping[str, str] | None = None) -> bytes | None:
    """Return the secret in the environment, else that in a file, or None.

    Raises ValueError if the variable is not hexadecimal (the message omits its value), and the
    errors of ``find_secret``.
    """
    variables = os.environ if variables is None else variables
    text = variables.get(environment.SECRET, "")
    if not text:
        return find_secret(variables)
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError(
            f"{environment.SECRET} must be hexadecimal digits; it is {len(text)} other characters"
        ) from None


def home_secret_file(variables: Mapping[str, str]) -> Path | None:
    """Return the path of the user's secret file, None for a process without a home directory."""
    config, home = variables.get("XDG_CONFIG_HOME"), variables.get("HOME")
    if config:
        return Path(config, "meshlib", "secret")
    return Path(home, ".config", "meshlib", "secret") if home else None


def find_secret(variables: Mapping[str, str]) -> bytes | None:
    """Return the secret in ``MESHLIB_SECRET_FILE``, or else in the user's file; None without one.

    Raises OSError if the file in the variable cannot be read, ValueError if a file holds no secret
    or other users can read the user's file.
    """
    named = variables.get(environment.SECRET_FILE)
    if named:
        return read_secret(Path(named))
    path = home_secret_file(variables)
    try:
        if path is None or not path.exists():
            return None
        mode = path.stat().st_mode
    except OSError:
        return None  # a home directory that this process may not read is another user's
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"secret file {path} can be read or written by others (mode {stat.S_IMODE(mode):04o});"
            f" expected 0600: chmod 600 {path}, or `meshlib secret --new` for another secret"
        )
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Return the secret in a file of hexadecimal digits. Messages never show its content.

    Raises OSError if the file cannot be read, ValueError if it holds no secret.
    """
    text = path.read_bytes().strip()
    try:
        secret = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        secret = b""
    if len(secret) < SECRET_BYTES // 2:
        raise ValueError(
            f"secret file {path}: expected at least {SECRET_BYTES} hexadecimal digits, as"
            " `meshlib secret` writes them"
        )
    return secret


def write_secret(path: Path) -> bytes:
    """Write a new secret into the file, which only its owner may read; return the secret.

    An existing file is replaced atomically.
    """
    secret = os.urandom(SECRET_BYTES)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secret.hex() + "\n")
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return secret
