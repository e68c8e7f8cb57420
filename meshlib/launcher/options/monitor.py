"""``--monitor [PORT]``: where the page of the job is to be."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

_ADDRESS = re.compile(r"(?:(?P<host>[^/]*):)?(?P<port>\d+)")
OPTION = "--monitor"
LOOPBACK = "127.0.0.1"


def page_address(text: str) -> tuple[str, int]:
    """Return the host and the port in ``PORT`` or ``HOST:PORT``; empty: any port of the loopback.

    Raises ArgumentTypeError.
    """
    found = _ADDRESS.fullmatch(text or "0")
    if found is None or int(found["port"]) > 65535:
        raise argparse.ArgumentTypeError(f"expected PORT or HOST:PORT, got {text!r}")
    host = found["host"]
    if host is None:
        return LOOPBACK, int(found["port"])
    return host.removeprefix("[").removesuffix("]"), int(found["port"])


def with_address(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``--monitor=`` for one that no address follows, but a program.

    To argparse, whatever follows an option that may have a value is its value.
    """
    words = list(argv)
    actions = parser._option_string_actions  # pyright: ignore[reportPrivateUsage]
    i = 0
    while i < len(words) and words[i].startswith("-"):
        action = actions.get(words[i])
        takes_next = action is not None and action.nargs is None
        if words[i] == OPTION:
            takes_next = i + 1 < len(words) and bool(_ADDRESS.fullmatch(words[i + 1]))
            if not takes_next:
                words[i] = f"{OPTION}="
        i += 2 if takes_next else 1
    return words
