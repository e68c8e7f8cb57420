"""The job's secret: in the environment, or in a file that ``meshlib secret`` writes, for nodes that
share a home.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from transport import _environment as environment

SECRET_BYTES = 32


def secret_from_environment(variables: Mapping[str, str] | None = None) -> bytes | None:
    """Return the secret that the launcher put into the environment, or None when there is none.

    Where no variable has it, the user's secret file has (see ``find_secret``). Raises
    ValueError when the variable is not hexadecimal (its value is not shown), ValueError and OSError
    for a file.
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
    """Return where the user's secret is, or would be; None for a process without a home."""
    config, home = variables.get("XDG_CONFIG_HOME"), variables.get("HOME")
    if config:
        return Path(config, "meshlib", "secret")
    return Path(home, ".config", "meshlib", "secret") if home else None


def find_secret(variables: Mapping[str, str]) -> bytes | None:
    """Return the secret in ``MESHLIB_SECRET_FILE``, or else in the user's file; None without one.

    Raises OSError when a file that is named cannot be read, ValueError for a file that holds no
    secret, and for the user's own when others may read it.
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
        return None  # a home that this process may not look into is none of its own
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"secret file {path} can be read or written by others (mode {stat.S_IMODE(mode):04o});"
            f" expected 0600: chmod 600 {path}, or `meshlib secret --new` for another secret"
        )
    return read_secret(path)


def read_secret(path: Path) -> bytes:
    """Return the secret that the file holds in hexadecimal digits; its content is never shown.

    Raises OSError when it cannot be read, ValueError when it holds none.
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
    """Put a fresh secret into the file, which only its owner may read; return it.

    A file that is there already is replaced at once, so that no reader sees half of one.
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
