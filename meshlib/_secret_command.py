"""``meshlib secret``: write the secret that all processes of a job share to a file of the user.

Machines that share a home need nothing else. For others, ``--print`` prints a value for
``MESHLIB_SECRET`` on all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshlib._command_line import OneLineParser, print_result
from transport._net.auth import new_secret
from transport._net.secret_file import find_secret, home_secret_file, write_secret


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv``; return the exit code."""
    parser = OneLineParser(
        prog="meshlib secret",
        description="Write a secret to a file that only you can read (mode 0600). meshrun and ranks"
        " read it if MESHLIB_SECRET is not set.",
        allow_abbrev=False,
    )
    parser.add_argument("--new", action="store_true", help="replace the existing secret")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="default: meshlib/secret in ~/.config"
    )
    parser.add_argument(
        "--print",
        dest="shown",
        action="store_true",
        help="write no file; print a new secret, for export MESHLIB_SECRET=$(...)",
    )
    given = parser.parse_args(argv)
    return print_result("meshlib secret", lambda: _answer(given.file, given.new, given.shown))


def _answer(file: Path | None, new: bool, shown: bool) -> str:
    if shown:
        return f"{new_secret().hex()}\n"
    path = file or home_secret_file(os.environ)
    if path is None:
        raise ValueError("there is no home directory (HOME); expected --file FILE")
    if new or not path.exists():
        write_secret(path)
        what = "a new secret is in"
    elif file is None:
        find_secret({**os.environ, "MESHLIB_SECRET_FILE": ""})  # raises if the secret is unusable
        what = "there is a secret already (--new replaces it) in"
    else:
        raise ValueError(f"{path} exists already; expected --new to replace it")
    needed = "" if file is None else f"; name it in MESHLIB_SECRET_FILE or --secret-file {path}"
    return f"{what} {path}{needed}\n"
